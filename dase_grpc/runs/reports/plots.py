"""The pictures of a report, each as inline SVG, or None where a run has nothing to show yet."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from dase_grpc.progress import LOWEST_WEIGHT
from dase_grpc.runs.curves import (
    SMOOTHING,
    Series,
    at_least,
    column,
    peers_of,
    shared_curves,
    smoothed,
    spread,
)
from dase_grpc.runs.reference import PublishedPoint, PublishedRow
from dase_grpc.runs.reports.figures import (
    INK,
    MUTED,
    NAMED_AGENTS,
    PALETTE,
    PAPER,
    THOUSANDS,
    Sheet,
    agent_colour,
)

Records = Sequence[Mapping[str, Any]]
Names = Callable[[int], str]
"""From an agent's id to what people call it, as `RunConfig.agent_name`."""

_BY_NUMBER: Final[Names] = "agent {}".format

_PANELS: Final = 4
_DECADES: Final = 200
"""Divergences beyond these powers of ten are drawn there: matplotlib's margins around them overflow."""
_MARKERS: Final = ("o", "s", "D", "^", "v", "P", "X")


def learning_curves(
    agents: Mapping[int, Series], published: Sequence[PublishedRow], *, name: Names = _BY_NUMBER
) -> str | None:
    """Each agent's evaluations and their smoothed curve, the mean over agents with half a standard deviation.

    The smoothed curves are left out below twice the smoothing's window, where they would hide the run.
    None where no evaluation is a finite number.
    """
    agents = {agent: curve for agent, curve in agents.items() if np.isfinite(curve.value).any()}
    if not agents:
        return None
    sheet = Sheet(height_in=4.0)
    axis = sheet.axes[0]
    axis.set_ylabel("mean return of an evaluation")
    for agent, curve in agents.items():
        _agent_curve(axis, agent, curve, name=name(agent), of=len(agents))
    if len(agents) > 1:
        _mean_curve(axis, list(agents.values()))
    last = max(int(curve.step[-1]) for curve in agents.values())
    _published_points(axis, published, last_step=last)
    axis.set_xlim(left=0, right=last * 1.02 or 1)
    return sheet.svg()


def similarity_over_time(agents: Mapping[int, Records]) -> str | None:
    """The λ that weighed and that of each collecting agent over time, a panel per learner, of the first."""
    tables = {agent: peers_of(agent, records) for agent, records in agents.items()}
    used = {agent: column(records, "similarity_weight") for agent, records in agents.items()}
    panels = [(agent, peers) for agent, peers in tables.items() if peers or len(used[agent])][:_PANELS]
    if not panels:
        return None
    sheet = Sheet(len(panels), height_in=2.9, share_y=True)
    sheet.axes[0].set_ylabel("similarity weight λ")
    for axis, (agent, peers) in zip(sheet.axes, panels, strict=True):
        _log_weights(axis)
        axis.set_xlabel(f"environment steps of agent {agent}")
        for source, series in peers.items():
            shown = Series(series.step, series.value.clip(LOWEST_WEIGHT))
            _agent_line(axis, source, shown, name=f"from agent {source}", of=len(agents))
        if len(used[agent]):
            shown = Series(used[agent].step, used[agent].value.clip(LOWEST_WEIGHT))
            _line(axis, shown, color=INK, label="weight used", linewidth=1.5, linestyle=(0, (3, 1)))
        axis.set_xlim(left=0)
    return sheet.svg()


def divergence_terms(agents: Mapping[int, Records]) -> str | None:
    """Both summands of the divergence over time: what the covariance and what the mean contributes."""
    terms = {"covariance term of ρ": "divergence_covariance", "mean term of ρ": "divergence_mean"}
    sheet = _panels(agents, terms, share_y=True, positive=True)
    if sheet is None:
        return None
    for axis in sheet.axes:
        axis.set_yscale("log")
    _whole_decades(sheet.axes[0])  # they share it
    return sheet.svg()


def distillation(agents: Mapping[int, Records], *, name: Names = _BY_NUMBER) -> str | None:
    """How many states of a batch each agent distilled on over time, and how much each of them weighed."""
    sheet = _panels(agents, {"share of states": "distilled_share", "confidence": "confidence"}, name=name)
    return None if sheet is None else sheet.svg()


def source_terms(agents: Mapping[int, Records]) -> str | None:
    """Both summands of ρ of each collecting agent over time, a panel per learner, of the first."""
    styles = {"divergence_covariance_by_source": "solid", "divergence_mean_by_source": (0, (1, 1.5))}
    tables = {
        agent: [
            (source, _positive(series), style)
            for key, style in styles.items()
            for source, series in peers_of(agent, records, key).items()
        ]
        for agent, records in agents.items()
    }
    panels = [each for each in tables.items() if any(len(series) for _, series, _ in each[1])][:_PANELS]
    if not panels:
        return None
    sheet = Sheet(len(panels), height_in=2.9, share_y=True)
    sheet.axes[0].set_ylabel("terms of ρ (nats)")
    for axis, (agent, table) in zip(sheet.axes, panels, strict=True):
        axis.set_yscale("log")
        axis.set_xlabel(f"environment steps of agent {agent}")
        for source, series, style in table:
            name = f"from agent {source}"
            _agent_line(axis, source, series, name=name, of=len(agents), linestyle=style)
        axis.set_xlim(left=0)
    _whole_decades(sheet.axes[0])  # they share it
    return sheet.svg()


def sharing(
    agents: Mapping[int, Records], batch_sizes: Collection[int], *, name: Names = _BY_NUMBER
) -> str | None:
    """How much external transitions count over time: their share of the loss weight, and Σ w / max w."""
    keys = {"external share of the loss weight": "external_share", "effective batch": "effective_batch"}
    sheet = _panels(agents, keys, name=name)
    if sheet is None:
        return None
    share, effective = sheet.axes
    share.set_ylim(-0.02, 1.02)
    for size in batch_sizes:
        effective.axhline(size, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="batch size")
    effective.set_ylim(0, max(batch_sizes) * 1.05)
    return sheet.svg()


def throughput(agents: Mapping[int, Records], *, name: Names = _BY_NUMBER) -> str | None:
    """Updates and environment steps per second of each agent over time."""
    rates = {"updates per second": "updates_per_second", "environment steps per second": "steps_per_second"}
    sheet = _panels(agents, rates, share_y=True, name=name)
    if sheet is None:
        return None
    sheet.axes[0].set_ylim(bottom=0)
    return sheet.svg()


def losses(agents: Mapping[int, Records], *, name: Names = _BY_NUMBER) -> str | None:
    """Critic loss and mean action value of each agent over time."""
    sheet = _panels(agents, {"critic loss": "critic_loss", "mean Q of a batch": "q_mean"}, name=name)
    return None if sheet is None else sheet.svg()


def buffer_fill(agents: Mapping[int, Records], capacity: int | None) -> str | None:
    """Transitions in the shared buffer, as the agent with the most records saw it; `capacity` where known."""
    series = max((column(records, "buffer_size") for records in agents.values()), key=len, default=None)
    if not series:
        return None
    sheet = Sheet(height_in=2.3)
    axis = sheet.axes[0]
    axis.set_ylabel("transitions")
    axis.yaxis.set_major_formatter(THOUSANDS)
    axis.fill_between(series.step, series.value, color=PALETTE[0], alpha=0.25, linewidth=0)
    _line(axis, series, color=PALETTE[0], label="in the buffer")
    if capacity is not None:
        axis.axhline(capacity, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="capacity")
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    return sheet.svg()


def _agent_curve(axis: Axes, agent: int, curve: Series, *, name: str, of: int) -> None:
    if len(curve) < 2 * SMOOTHING:
        _agent_line(axis, agent, curve, name=name, of=of)
        return
    _line(axis, curve, color=agent_colour(agent, of=of), linewidth=0.8, alpha=0.35)
    _agent_line(axis, agent, Series(curve.step, smoothed(curve.value)), name=name, of=of)


def _mean_curve(axis: Axes, agents: Sequence[Series]) -> None:
    shared = shared_curves(agents)
    if not len(shared.step):
        return
    values = smoothed(shared.value) if len(shared.step) >= 2 * SMOOTHING else shared.value
    mean, half = values.mean(axis=0), spread(values) / 2
    axis.fill_between(shared.step, mean - half, mean + half, color=INK, alpha=0.1, linewidth=0)
    axis.plot(shared.step, mean, color=INK, linewidth=2, label="mean over agents")


def _published_points(axis: Axes, published: Sequence[PublishedRow], *, last_step: int) -> None:
    for index, row in enumerate(published):
        points = [point for point in row.points if point.step <= last_step]
        published_points(axis, row, points, marker=_MARKERS[index % len(_MARKERS)])


def published_points(
    axis: Axes,
    row: PublishedRow,
    points: Sequence[PublishedPoint],
    *,
    name: str = "",
    marker: str = _MARKERS[0],
    colour: str = MUTED,
    paper: str = PAPER,
) -> None:
    """Dots with half a standard deviation; hollow where the row carries no information of its own.

    name is the row's method unless it is given.
    """
    if not points:
        return
    axis.errorbar(
        [point.step for point in points],
        [point.mean for point in points],
        yerr=[point.std / 2 for point in points],
        fmt=marker,
        color=colour,
        markerfacecolor=paper if row.combined else colour,
        markersize=5,
        capsize=2.5,
        elinewidth=1,
        label=f"published: {name or row.method}{' (combination)' if row.combined else ''}",
        zorder=4,
    )


def _log_weights(axis: Axes) -> None:
    axis.set_yscale("log")
    axis.set_ylim(LOWEST_WEIGHT / 1.5, 1.5)
    axis.yaxis.set_major_locator(LogLocator(10, numticks=6))
    axis.yaxis.set_minor_locator(NullLocator())


def _whole_decades(axis: Axes) -> None:
    """Widens a logarithmic axis to powers of ten, so that at least two of its ticks have a label."""
    lowest, highest = axis.get_ylim()
    low = math.floor(math.log10(lowest))
    high = max(math.ceil(math.log10(highest)), low + 1)
    step = math.ceil((high - low) / 5)
    axis.yaxis.set_major_locator(FixedLocator([10.0**power for power in range(low, high + 1, step)]))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_ylim(10.0**low, 10.0**high)


def _panels(
    agents: Mapping[int, Records],
    panels: Mapping[str, str],
    *,
    share_y: bool = False,
    positive: bool = False,
    name: Names = _BY_NUMBER,
) -> Sheet | None:
    """One panel for each (label, key), one line for each agent; None where no record has any of them.

    With `positive`, other numbers are left out, as a logarithmic scale asks for.
    """
    table = [
        (position, agent, _positive(column(records, key)) if positive else column(records, key))
        for position, key in enumerate(panels.values())
        for agent, records in agents.items()
    ]
    if not any(len(series) for _, _, series in table):
        return None
    sheet = Sheet(len(panels), height_in=2.7, share_y=share_y)
    for axis, label in zip(sheet.axes, panels, strict=True):
        axis.set_ylabel(label)
    for position, agent, series in table:
        _agent_line(sheet.axes[position], agent, series, name=name(agent), of=len(agents))
        sheet.axes[position].set_xlim(left=0)
    return sheet


def _positive(series: Series) -> Series:
    """What a logarithmic scale can show."""
    kept = at_least(series, np.nextafter(0, 1))
    return Series(kept.step, kept.value.clip(10.0**-_DECADES, 10.0**_DECADES))


def _agent_line(
    axis: Axes, agent: int, series: Series, *, name: str, of: int, linestyle: Any = "solid"
) -> None:
    crowded = of > NAMED_AGENTS
    label = None if crowded else name
    alpha, width = (0.35, 0.9) if crowded else (1.0, 1.5)
    _line(
        axis,
        series,
        color=agent_colour(agent, of=of),
        label=label,
        alpha=alpha,
        linewidth=width,
        linestyle=linestyle,
    )


def _line(axis: Axes, series: Series, **style: Any) -> None:
    dot = "o" if len(series) == 1 else None
    axis.plot(series.step, series.value, marker=dot, markersize=3, **style)
