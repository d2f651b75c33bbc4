"""The dashboard to open first: does the run get on, and how fast."""

from typing import Final

from grafana_foundation_sdk.builders import stat, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.frame import EXPLORER, LEARNER, REPLAY, STEPS_BY_AGENT, dashboard
from dashboards.panels import lines, number

BY_EVALUATORS: Final = 'job="dase-evaluator", agent_id=~"$agent"'


def overview() -> Dashboard:
    """Progress, throughput and health of a run, replay and learners together."""
    made = dashboard("dase-overview", "DASE overview", __doc__ or "", ("replay", "learner", "agent"))
    for panel in (*_numbers(), *_returns(), *_speed(), *_nodes()):
        made.with_panel(panel)
    return made


def _numbers() -> list[stat.Panel]:
    """The run as a whole, now."""
    return [
        number("Agents", "Agents whose lease is live.", f'sum(dase_replay_leases{{state="live", {REPLAY}}})'),
        number(
            "Steps", "Environment steps of all agents.", f"sum(dase_explorer_env_steps_total{{{EXPLORER}}})"
        ),
        number("Updates", "Updates of all agents.", f"sum(dase_learner_updates_total{{{LEARNER}}})"),
        number(
            "Buffer",
            "How full the shared buffer is.",
            f"sum(dase_replay_buffer_transitions{{{REPLAY}}}) "
            f"/ sum(dase_replay_buffer_capacity_transitions{{{REPLAY}}})",
            unit="percentunit",
        ),
        number(
            "Targets down",
            "Nodes that Prometheus is told to scrape and that do not answer.",
            'count(up{job=~"dase-.+"}) - sum(up{job=~"dase-.+"})',
        ),
        number(
            "Alerts",
            "Alerts of DASE that fire, if Prometheus has loaded deploy/prometheus/rules.",
            'sum(ALERTS{alertname=~"Dase.+", alertstate="firing"}) or vector(0)',
        ),
    ]


def _returns() -> list[timeseries.Panel]:
    """What the agents reach."""
    return [
        lines(
            "Evaluation return",
            "Mean return of each agent's latest evaluation, by its learner or by an evaluator, without "
            "exploration noise.",
            [
                (
                    f"dase_evaluation_return_mean{{{LEARNER}}} "
                    f"or dase_evaluation_return_mean{{{BY_EVALUATORS}}}",
                    "agent {{agent_id}}",
                )
            ],
            width=12,
        ),
        lines(
            "Episode return",
            "Return of each agent's latest training episode, the mean over its learner and its actors.",
            [(f"avg by (agent_id) (dase_explorer_episode_return{{{EXPLORER}}})", "agent {{agent_id}}")],
            width=12,
        ),
    ]


def _speed() -> list[timeseries.Panel]:
    """How fast they are, and whether they share."""
    return [
        lines(
            "Environment steps per second",
            "What each agent explores, its actors included.",
            [(STEPS_BY_AGENT, "agent {{agent_id}}")],
        ),
        lines(
            "Updates per second",
            "Training iterations of each agent.",
            [(f"rate(dase_learner_updates_total{{{LEARNER}}}[$__rate_interval])", "agent {{agent_id}}")],
        ),
        lines(
            "Share of others in the loss",
            "Share of the loss weights that the other agents' transitions have.",
            [(f"dase_similarity_external_share_ratio{{{LEARNER}}}", "agent {{agent_id}}")],
            unit="percentunit",
        ),
    ]


def _nodes() -> list[timeseries.Panel]:
    """What the processes take."""
    return [
        lines(
            "Memory",
            "Resident memory of each node.",
            [('process_resident_memory_bytes{job=~"dase-.+"}', "{{instance}}")],
            unit="bytes",
        ),
        lines(
            "Processor",
            "Processor cores that each node keeps busy.",
            [('rate(process_cpu_seconds_total{job=~"dase-.+"}[$__rate_interval])', "{{instance}}")],
        ),
        lines(
            "Versions",
            "Nodes by version; more than one line means that a run is mixed.",
            [("count by (version) (dase_build_info)", "{{version}}")],
        ),
    ]
