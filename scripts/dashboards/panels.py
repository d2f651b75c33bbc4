"""What the panels of all dashboards have in common: units, legends, sizes and where data comes from."""

from collections.abc import Sequence
from typing import Final

from grafana_foundation_sdk.builders import common as shared
from grafana_foundation_sdk.builders import dashboard as board
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as models
from grafana_foundation_sdk.models import dashboard as grafana
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT: Final = 8
WIDTH: Final = 8
"""A third of the 24 columns that a dashboard has."""

Query = tuple[str, str]
"""An expression in PromQL, and the legend of its series."""


def query(expression: str, legend: str, *, ref: str, instant: bool = False) -> prometheus.Dataquery:
    """One query of a panel; `ref` names it within the panel."""
    made = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(ref).datasource(SOURCE)
    return made.instant().format(PromQueryFormat.TABLE) if instant else made.range()


def lines(
    title: str,
    text: str,
    queries: Sequence[Query],
    *,
    unit: str = "short",
    width: int = WIDTH,
    stacked: bool = False,
    logarithmic: bool = False,
) -> timeseries.Panel:
    """Lines over time. `unit` is Grafana's name of one, such as `s`, `bytes` or `percentunit`."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .height(HEIGHT)
        .span(width)
        .fill_opacity(30 if stacked else 5)
        .legend(shared.VizLegendOptions().show_legend(True).placement(models.LegendPlacement.BOTTOM))
        .tooltip(shared.VizTooltipOptions().mode(models.TooltipDisplayMode.MULTI))
    )
    if stacked:
        panel.stacking(shared.StackingConfig().mode(models.StackingMode.NORMAL))
    if logarithmic:
        panel.scale_distribution(shared.ScaleDistributionConfig().type(models.ScaleDistribution.LOG).log(10))
    for index, (expression, legend) in enumerate(queries):
        panel.with_target(query(expression, legend, ref=chr(ord("A") + index)))
    return panel


def number(title: str, text: str, expression: str, *, unit: str = "short", width: int = 4) -> stat.Panel:
    """One number, its latest value, over its course."""
    return (
        stat.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .height(4)
        .span(width)
        .graph_mode(models.BigValueGraphMode.AREA)
        .reduce_options(shared.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(query(expression, "", ref="A"))
    )


def matrix(
    title: str, text: str, expression: str, *, limits: tuple[float, float], decimals: int, width: int
) -> table.Panel:
    """A heat map of pairs as they are now: agents down, collecting agents across, the value as colour.

    The expression gives one series for each pair of agent_id and source_agent_id.
    """
    colour = board.FieldColor().mode(grafana.FieldColorModeId.CONTINUOUS_BL_YL_RD)
    pairs = {"rowField": "agent_id", "columnField": "source_agent_id", "valueField": "Value"}
    cells = models.TableColoredBackgroundCellOptions(mode=models.TableCellBackgroundDisplayMode.BASIC)
    return (
        table.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .height(12)
        .span(width)
        .min(limits[0])
        .max(limits[1])
        .decimals(decimals)
        .color_scheme(colour)
        .cell_options(cells)
        .override_by_name(
            "agent_id\\source_agent_id",
            [grafana.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "auto"})],
        )
        .with_target(query(expression, "", ref="A", instant=True))
        .with_transformation(grafana.DataTransformerConfig(id_val="groupingToMatrix", options=pairs))
    )
