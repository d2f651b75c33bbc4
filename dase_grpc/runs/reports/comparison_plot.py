"""The picture of a comparison: mean curves of every cell, by the steps of each agent and of all together."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes

from dase_grpc.runs.curves import SMOOTHING
from dase_grpc.runs.reports.compare import CellResults, Comparison, EnvironmentResults, on
from dase_grpc.runs.reports.figures import PAGE, PALETTE, Inks, Sheet
from dase_grpc.runs.reports.plots import MARKERS, mean_curve, published_points

PANELS: Final = 2
"""Of each environment of a comparison: by steps of each agent, and by steps of all agents together."""
_SIDE_BY_SIDE_FROM: Final = 4
_ROW_IN: Final = 2.9
_HEAD_IN: Final = 0.55
_PANEL_IN: Final = 4.6
_LEGEND_CHARACTERS: Final = 110
_SHOWN_NAME: Final = 60
_LINES: Final = ("-", (0, (4, 1.5)), (0, (1, 1.2)))


def comparison_sheet(comparison: Comparison, *, inks: Inks = PAGE) -> Sheet:
    """Draws a comparison: mean curves over runs, smoothed, with half a standard deviation shaded.

    One row of two panels for each environment; from four environments on, two of them in a row.
    """
    count = len(comparison.environments)
    abreast = 2 if count >= _SIDE_BY_SIDE_FROM else 1
    rows = -(-count // abreast)
    names = list(dict.fromkeys(cell.label for cell in comparison.cells))
    published = [f"published: {cell.label}" for cell in comparison.cells if cell.row is not None]
    longest = max(map(len, [*names, *published])) + 6
    room = _LEGEND_CHARACTERS * (1 + abreast) // 2 // longest
    drawn = Sheet(
        PANELS * abreast,
        rows,
        height_in=_HEAD_IN + _ROW_IN * rows,
        width_in=_PANEL_IN * PANELS * (1.0 if abreast == 1 else 1.5),
        inks=inks,
        legend_columns=max(1, min(len(names) + len(published), room)),
        sort_names=False,
    )
    for index, each in enumerate(comparison.environments):
        _environment(drawn.axes[PANELS * index : PANELS * index + PANELS], each, names, inks=inks)
    for empty in drawn.axes[PANELS * count :]:
        empty.remove()
    del drawn.axes[PANELS * count :]
    return drawn


def is_smoothed(each: EnvironmentResults) -> bool:
    """Whether all its curves are long enough for the smoothing's window not to hide them.

    Smoothed curves lag behind, so an environment has none of them beside such as are not.
    """
    return all(len(cell.steps) >= 2 * SMOOTHING for cell in each.cells)


def _environment(axes: Sequence[Axes], each: EnvironmentResults, names: Sequence[str], *, inks: Inks) -> None:
    by_agent, in_total = axes
    in_total.sharey(by_agent)
    short = each.name if len(each.name) <= _SHOWN_NAME else f"{each.name[: _SHOWN_NAME - 1]}…"
    by_agent.set_title(short, loc="left", fontsize=9, fontweight="bold")
    by_agent.set_ylabel("mean return of an evaluation")
    by_agent.set_xlabel("environment steps of each agent")
    in_total.set_xlabel("environment steps of all agents together")
    in_total.tick_params(labelleft=False)
    smooth = is_smoothed(each)
    for cell in each.cells:
        position = names.index(cell.label)
        _curve(by_agent, cell, position, factor=1, smooth=smooth)
        _curve(in_total, cell, position, factor=cell.group.agents, smooth=smooth)
    for cell in each.cells:
        if cell.row is not None:
            position, points = names.index(cell.label), cell.row.until(int(cell.steps[-1]))
            style = {"marker": _turn(MARKERS, position), "colour": _turn(PALETTE, position)}
            published_points(by_agent, cell.row, points, name=cell.label, paper=inks.paper, **style)
    _common_end(by_agent, each.last_step, max(int(cell.steps[-1]) for cell in each.cells), inks)
    totals = [int(cell.steps[-1]) * cell.group.agents for cell in each.cells]
    _common_end(in_total, each.total_steps, max(totals), inks)


def _curve(axis: Axes, cell: CellResults, position: int, *, factor: int, smooth: bool) -> None:
    values = np.stack([on(run, cell.steps).value for run in cell.runs])
    mean_curve(
        axis,
        cell.steps * factor,
        values,
        smooth=smooth,
        shade=0.2,
        color=_turn(PALETTE, position),
        linestyle=_LINES[position // len(PALETTE) % len(_LINES)],
        linewidth=1.7,
        label=cell.label,
        marker="o" if len(cell.steps) == 1 else None,
        markersize=3,
    )


def _common_end(axis: Axes, common: int, last: int, inks: Inks) -> None:
    """A line where the comparison ends, if a curve goes on behind it."""
    if last > common:
        dashes = (0, (2, 2))
        axis.axvline(common, color=inks.muted, linewidth=1, linestyle=dashes, label="compared up to here")
    axis.set_xlim(0, last * 1.02 or 1)


def _turn(values: Sequence[str], position: int) -> str:
    """One of the values, which come again after the last."""
    return values[position % len(values)]
