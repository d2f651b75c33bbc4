"""The frame around the panels of each dashboard: its name, its variables, links to the others."""

from typing import Final

from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.models import dashboard as grafana

from dashboards.panels import SOURCE

TAG: Final = "dase"
RUN: Final = 'run=~"$run"'
"""Targets have it as a label where Prometheus scrapes several runs; "All" is those, too, that have none."""

VARIABLES: Final = {
    "run": ("Run", "label_values(dase_build_info, run)"),
    "replay": ("Replay", f"label_values(dase_replay_buffer_capacity_transitions{{{RUN}}}, instance)"),
    "learner": ("Learner", f"label_values(dase_learner_updates_total{{{RUN}}}, instance)"),
    "actor": ("Actor", f"label_values(dase_actor_environments{{{RUN}}}, instance)"),
    "evaluator": ("Evaluator", f"label_values(dase_evaluation_skipped_total{{{RUN}}}, instance)"),
    "server": ("Policy server", f"label_values(dase_inference_queued_observations{{{RUN}}}, instance)"),
    "agent": ("Agent", f"label_values(dase_replay_inserted_transitions_total{{{RUN}}}, agent_id)"),
}
"""What a reader can choose, by name: its label, and where its values come from. All have the run."""

NODE: Final = f'job=~"dase-.+", {RUN}'
REPLAY: Final = f'job="dase-replay", {RUN}, instance=~"$replay"'
LEARNER: Final = f'job="dase-learner", {RUN}, instance=~"$learner", agent_id=~"$agent"'
LEARNERS_PROCESS: Final = f'job="dase-learner", {RUN}, instance=~"$learner"'
ACTOR: Final = f'job="dase-actor", {RUN}, instance=~"$actor", agent_id=~"$agent"'
EVALUATOR: Final = f'job="dase-evaluator", {RUN}, instance=~"$evaluator", agent_id=~"$agent"'
EVALUATORS_PROCESS: Final = f'job="dase-evaluator", {RUN}, instance=~"$evaluator"'
SERVER: Final = f'job="dase-serve", {RUN}, instance=~"$server"'
EXPLORER: Final = f'job=~"dase-(learner|actor)", {RUN}, agent_id=~"$agent"'
"""All that explore for an agent: its learner and its actors."""


def by_agent(metric: str) -> str:
    """The rate of a counter of all that explore for an agent."""
    return f"sum by (run, agent_id) (rate({metric}{{{EXPLORER}}}[$__rate_interval]))"


STEPS_BY_AGENT: Final = by_agent("dase_explorer_env_steps_total")


def dashboard(uid: str, title: str, text: str, variables: tuple[str, ...]) -> board.Dashboard:
    """A dashboard without panels; `uid` is a part of its address and the name of its file."""
    made = (
        board.Dashboard(title)
        .uid(uid)
        .description(text)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(grafana.DashboardCursorSync.CROSSHAIR)
        .with_variable(board.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .link(
            board.DashboardLink("DASE")
            .type(grafana.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
    )
    for name in ("run", *variables):
        label, values = VARIABLES[name]
        made.with_variable(
            board.QueryVariable(name)
            .label(label)
            .datasource(SOURCE)
            .query(values)
            .refresh(grafana.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(grafana.VariableSort.NUMERICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(grafana.VariableOption(selected=True, text="All", value="$__all"))
        )
    return made
