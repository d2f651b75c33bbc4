"""Who learns from whom: the similarity of every pair of agents, and what it makes of the losses."""

from grafana_foundation_sdk.builders import table, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.frame import LEARNER, dashboard
from dashboards.panels import lines, matrix

SELECTED = f"{{{LEARNER}}}"
PAIRS = f"max by (agent_id, source_agent_id) (dase_similarity_weight_ratio{SELECTED})"
SMALLEST = "1e-12"


def similarity() -> Dashboard:
    """The K x K matrix as a heat map, linear and by order of magnitude, and its course."""
    made = dashboard("dase-similarity", "DASE similarity", __doc__ or "", ("learner", "agent"))
    for panel in (*_matrices(), *_weights(), *_sources(), *_divergences()):
        made.with_panel(panel)
    return made


def _matrices() -> list[table.Panel]:
    """Every pair, now."""
    return [
        matrix(
            "Similarity λ",
            "Row: the agent that learns. Column: the agent that collected. 1 on the diagonal.",
            PAIRS,
            limits=(0.0, 1.0),
            decimals=3,
            width=12,
        ),
        matrix(
            "Similarity, log10 λ",
            f"The same by order of magnitude, down to {SMALLEST}: below -7 a float32 loss does not notice.",
            f"log10(clamp_min({PAIRS}, {SMALLEST}))",
            limits=(-12.0, 0.0),
            decimals=1,
            width=12,
        ),
    ]


def _weights() -> list[timeseries.Panel]:
    """What similarity makes of the losses."""
    return [
        lines(
            "Similarity by source",
            "λ of each collecting agent by itself.",
            [(f"dase_similarity_weight_ratio{SELECTED}", "{{agent_id}} of {{source_agent_id}}")],
            logarithmic=True,
            width=12,
        ),
        lines(
            "Weight in the loss",
            "λ of all external transitions of a batch, which is what weighs.",
            [(f"dase_similarity_pooled_weight_ratio{SELECTED}", "agent {{agent_id}}")],
            logarithmic=True,
            width=12,
        ),
    ]


def _sources() -> list[timeseries.Panel]:
    """How much comes from others."""
    return [
        lines(
            "Share of others in the loss",
            "Share of the loss weights that external transitions have.",
            [(f"dase_similarity_external_share_ratio{SELECTED}", "agent {{agent_id}}")],
            unit="percentunit",
        ),
        lines(
            "Effective sources",
            "(Σ λ)² / Σ λ² over all agents, the agent itself among them: how many it learns from.",
            [
                (
                    f"sum by (agent_id) ({PAIRS}) ^ 2 / sum by (agent_id) ({PAIRS} ^ 2)",
                    "agent {{agent_id}}",
                )
            ],
        ),
        lines(
            "Effective batch",
            "Sum of a batch's loss weights over the largest of them.",
            [(f"dase_similarity_effective_batch_transitions{SELECTED}", "agent {{agent_id}}")],
        ),
    ]


def _divergences() -> list[timeseries.Panel]:
    """Why a similarity is what it is."""
    return [
        lines(
            "Divergence by term",
            "ρ of the external transitions: what spread and what shift of the actions contribute, in nats.",
            [(f"dase_similarity_divergence_nats{SELECTED}", "agent {{agent_id}} {{term}}")],
            logarithmic=True,
        ),
        lines(
            "Divergence by source",
            "The same for each collecting agent by itself.",
            [
                (
                    f"dase_similarity_source_divergence_nats{SELECTED}",
                    "{{agent_id}} of {{source_agent_id}} {{term}}",
                )
            ],
            logarithmic=True,
        ),
        lines(
            "Measure",
            "What weighs the transitions of others (`dps.measure`), and for how many agents.",
            [(f"count by (measure) (dase_similarity_measure_info{SELECTED})", "{{measure}}")],
        ),
        lines(
            "Since the last measurement",
            "Seconds since another agent's similarity was measured; see the alert DaseSimilarityStale.",
            [(f"time() - dase_similarity_last_update_timestamp_seconds{SELECTED}", "agent {{agent_id}}")],
            unit="s",
        ),
    ]
