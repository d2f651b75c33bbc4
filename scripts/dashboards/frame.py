"""The frame around the panels of each dashboard: its name, its variables, links to the others."""

from typing import Final

from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.models import dashboard as grafana

from dashboards.panels import SOURCE

TAG: Final = "dase"
VARIABLES: Final = {
    "replay": ("Replay", "label_values(dase_replay_buffer_capacity_transitions, instance)"),
    "learner": ("Learner", "label_values(dase_explorer_env_steps_total, instance)"),
    "agent": ("Agent", 'label_values(dase_explorer_env_steps_total{instance=~"$learner"}, agent_id)'),
}
"""What a reader can choose, by name: its label, and where its values come from."""

REPLAY: Final = 'instance=~"$replay"'
LEARNER: Final = 'instance=~"$learner", agent_id=~"$agent"'


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
