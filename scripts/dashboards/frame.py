"""The frame around the panels of each dashboard: its name, its variables, links to the others."""

from typing import Final

from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.models import dashboard as grafana

from dashboards.panels import SOURCE

TAG: Final = "dase"
VARIABLES: Final = {
    "replay": ("Replay", "label_values(dase_replay_buffer_capacity_transitions, instance)"),
    "learner": ("Learner", "label_values(dase_learner_updates_total, instance)"),
    "actor": ("Actor", "label_values(dase_actor_environments, instance)"),
    "evaluator": ("Evaluator", "label_values(dase_evaluation_skipped_total, instance)"),
    "agent": ("Agent", "label_values(dase_replay_inserted_transitions_total, agent_id)"),
}
"""What a reader can choose, by name: its label, and where its values come from."""

REPLAY: Final = 'instance=~"$replay"'
LEARNER: Final = 'job="dase-learner", instance=~"$learner", agent_id=~"$agent"'
ACTOR: Final = 'job="dase-actor", instance=~"$actor", agent_id=~"$agent"'
EVALUATOR: Final = 'job="dase-evaluator", instance=~"$evaluator", agent_id=~"$agent"'
EXPLORER: Final = 'job=~"dase-(learner|actor)", agent_id=~"$agent"'
"""All that explore for an agent: its learner and its actors."""

STEPS_BY_AGENT: Final = (
    f"sum by (agent_id) (rate(dase_explorer_env_steps_total{{{EXPLORER}}}[$__rate_interval]))"
)


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
    for name in variables:
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
