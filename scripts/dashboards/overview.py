"""The dashboard to open first: does the run get on, and how fast."""

from typing import Final

from grafana_foundation_sdk.builders import stat, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.frame import EXPLORER, LEARNER, NODE, REPLAY, RUN, STEPS_BY_AGENT, by_agent, dashboard
from dashboards.panels import lines, number

BY_EVALUATORS: Final = f'job="dase-evaluator", {RUN}, agent_id=~"$agent"'


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
            f"count(up{{{NODE}}}) - sum(up{{{NODE}}})",
        ),
        number(
            "Alerts",
            "Alerts of DASE that fire, if Prometheus has loaded deploy/prometheus/rules.",
            f'sum(ALERTS{{alertname=~"Dase.+", alertstate="firing", {RUN}}}) or vector(0)',
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
            [(f"avg by (run, agent_id) (dase_explorer_episode_return{{{EXPLORER}}})", "agent {{agent_id}}")],
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
            "Episodes per second",
            "What each agent ends, its actors included.",
            [(by_agent("dase_explorer_episodes_total"), "agent {{agent_id}}")],
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
            [(f"process_resident_memory_bytes{{{NODE}}}", "{{instance}}")],
            unit="bytes",
        ),
        lines(
            "Processor",
            "Processor cores that each node keeps busy.",
            [(f"rate(process_cpu_seconds_total{{{NODE}}}[$__rate_interval])", "{{instance}}")],
        ),
        lines(
            "Versions",
            "Nodes by version; more than one line means that a run is mixed.",
            [(f"count by (version) (dase_build_info{{{NODE}}})", "{{version}}")],
        ),
        lines(
            "Open files",
            "Share of the files that each node may open; a replay has one for each connection.",
            [(f"process_open_fds{{{NODE}}} / process_max_fds{{{NODE}}}", "{{instance}}")],
            unit="percentunit",
        ),
        lines(
            "Since the start",
            "How long each node has run; a fall to 0 is a start.",
            [(f"time() - process_start_time_seconds{{{NODE}}}", "{{instance}}")],
            unit="s",
        ),
    ]
