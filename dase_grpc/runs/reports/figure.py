"""The picture of a comparison: for each environment, curves over each agent's steps and over all agents'."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes

from dase_grpc.runs.curves import SMOOTHING, smoothed, spread
from dase_grpc.runs.reports.compare import Cell, Comparison, EnvironmentResults, on
from dase_grpc.runs.reports.figures import PAGE, PALETTE, Inks, Sheet
from dase_grpc.runs.reports.plots import published_points

PANELS: Final = 2
"""Of each environment: by steps of each agent, and by steps of all agents together."""
_SIDE_BY_SIDE_FROM: Final = 4
_ROW_IN: Final = 2.9
_HEAD_IN: Final = 0.55
_PANEL_IN: Final = 4.6
_LEGEND_CHARACTERS: Final = 110
_LINES: Final = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
_MARKERS: Final = ("o", "s", "D", "^", "v", "P", "X")
_SHOWN_NAME: Final = 60


def sheet(comparison: Comparison, *, inks: Inks = PAGE) -> Sheet:
    """Draws the comparison: mean curves over runs, smoothed, with half a standard deviation shaded.

    One row of two panels for each environment; from four environments on, two of them in a row.
    """
    count = len(comparison.environments)
    abreast = 2 if count >= _SIDE_BY_SIDE_FROM else 1
    rows = -(-count // abreast)
    names = list(dict.fromkeys(cell.label for cell in comparison.cells))
    drawn = Sheet(
        PANELS * abreast,
        rows,
        height_in=_HEAD_IN + _ROW_IN * rows,
        width_in=_PANEL_IN * PANELS * (1.0 if abreast == 1 else 1.5),
        inks=inks,
        legend_columns=_legend_columns([*names, *_published_names(comparison)], abreast),
        sort_names=False,
    )
    for index, each in enumerate(comparison.environments):
        by_agent, in_total = drawn.axes[PANELS * index : PANELS * index + PANELS]
        in_total.sharey(by_agent)
        _environment(by_agent, in_total, each, names, inks=inks)
    for empty in drawn.axes[PANELS * count :]:
        empty.remove()
    del drawn.axes[PANELS * count :]
    return drawn


def is_smoothed(cell: Cell) -> bool:
    """Whether the cell's curves are long enough for the smoothing's window not to hide them."""
    return len(cell.steps) >= 2 * SMOOTHING


def _environment(
    by_agent: Axes, in_total: Axes, each: EnvironmentResults, names: Sequence[str], *, inks: Inks
) -> None:
    by_agent.set_title(_short(each.name), loc="left", fontsize=9, fontweight="bold")
    by_agent.set_ylabel("mean return of an evaluation")
    by_agent.set_xlabel("environment steps of each agent")
    in_total.set_xlabel("environment steps of all agents together")
    in_total.tick_params(labelleft=False)
    for cell in each.cells:
        position = names.index(cell.label)
        _curve(by_agent, cell, position, factor=1)
        _curve(in_total, cell, position, factor=cell.group.agents)
    for cell in each.cells:
        if cell.row is not None:
            position = names.index(cell.label)
            published_points(
                by_agent,
                cell.row,
                cell.row.until(int(cell.steps[-1])),
                name=cell.label,
                marker=_MARKERS[position % len(_MARKERS)],
                colour=PALETTE[position % len(PALETTE)],
                paper=inks.paper,
            )
    _common_end(by_agent, each.last_step, {int(cell.steps[-1]) for cell in each.cells}, inks)
    _common_end(
        in_total, each.total_steps, {int(cell.steps[-1]) * cell.group.agents for cell in each.cells}, inks
    )


def _curve(axis: Axes, cell: Cell, position: int, *, factor: int) -> None:
    values = np.stack([on(run, cell.steps).value for run in cell.runs])
    if is_smoothed(cell):
        values = smoothed(values)
    steps, mean, half = cell.steps * factor, values.mean(axis=0), spread(values) / 2
    colour = PALETTE[position % len(PALETTE)]
    line = _LINES[position // len(PALETTE) % len(_LINES)]
    dot = "o" if len(steps) == 1 else None
    axis.fill_between(steps, mean - half, mean + half, color=colour, alpha=0.2, linewidth=0)
    axis.plot(
        steps, mean, color=colour, linestyle=line, linewidth=1.7, label=cell.label, marker=dot, markersize=3
    )


def _common_end(axis: Axes, common: int, ends: set[int], inks: Inks) -> None:
    """A line where the comparison ends, if a curve goes on behind it."""
    last = max(ends)
    if last > common:
        axis.axvline(
            common, color=inks.muted, linewidth=1, linestyle=(0, (2, 2)), label="compared up to here"
        )
    axis.set_xlim(0, last * 1.02 or 1)


def _legend_columns(names: Sequence[str], abreast: int) -> int:
    longest = max(map(len, names)) + 6
    return max(1, min(len(names), _LEGEND_CHARACTERS * (1 + abreast) // 2 // longest))


def _published_names(comparison: Comparison) -> list[str]:
    return [f"published: {cell.label}" for cell in comparison.cells if cell.row is not None]


def _short(name: str) -> str:
    return name if len(name) <= _SHOWN_NAME else f"{name[: _SHOWN_NAME - 1]}…"
