"""A pair that distils (DPD): how much each learns from the other's policy, and how old that is."""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.frame import LEARNER, dashboard
from dashboards.panels import lines

SELECTED: Final = f"{{{LEARNER}}}"
BY_AGENT: Final = "agent {{agent_id}}"


def distillation() -> Dashboard:
    """What distillation shows of each of the two."""
    made = dashboard("dase-distillation", "DASE distillation", __doc__ or "", ("learner", "agent"))
    shown = (
        (
            "States distilled on",
            "Share of a batch's states: those where the peer's value was higher, or all (dpd.states).",
            f"dase_distillation_states_ratio{SELECTED}",
            "percentunit",
        ),
        (
            "Confidence",
            "Mean weight of a state that is distilled on.",
            f"dase_distillation_confidence_ratio{SELECTED}",
            "short",
        ),
        (
            "Lag of the peer's policy",
            "Updates by which an agent is ahead of the policy that it has of its peer.",
            f"dase_distillation_peer_lag_updates{SELECTED}",
            "short",
        ),
        (
            "Updates without a peer",
            "Updates per second that knew no policy of the peer; 0 once both have published.",
            f"rate(dase_distillation_missed_updates_total{SELECTED}[$__rate_interval])",
            "short",
        ),
        (
            "Refused policies",
            "Policies of the peer that were not finite, since the start.",
            f"dase_distillation_refused_policies_total{SELECTED}",
            "short",
        ),
    )
    for title, text, expression, unit in shown:
        made.with_panel(lines(title, text, [(expression, BY_AGENT)], unit=unit))
    return made
