"""The pictures of a report, inline SVG or None where there is nothing to show yet."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from dase_grpc.progress import LOWEST_WEIGHT
from dase_grpc.runs.curves import (
    LARGEST,
    SMOOTHING,
    Series,
    column,
    drawable,
    mean_of,
    peers_of,
    shared_curves,
    smoothed,
    spread,
)
from dase_grpc.runs.logs import Floats, Ints
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

_LEARNERS: Final = 4
"""Of so many learners, the first, a report has a panel each."""
_DECADES: Final = 200
"""Divergences beyond these powers of ten are drawn there: matplotlib's margins around them overflow."""
MARKERS: Final = ("o", "s", "D", "^", "v", "P", "X")


def learning_curves(
    agents: Mapping[int, Series], published: Sequence[PublishedRow], *, name: Names
) -> str | None:
    """Each agent's evaluations and their smoothed curve, the mean over agents with half a standard deviation.

    The smoothed curves are left out below twice the smoothing's window, where they would hide the run.
    None where no evaluation is a finite number.
    """
    drawn = {agent: drawable(curve) for agent, curve in agents.items()}
    agents = {agent: curve for agent, curve in drawn.items() if np.isfinite(curve.value).any()}
    if not agents:
        return None
    sheet = Sheet(height_in=4.0)
    axis = sheet.axes[0]
    axis.set_ylabel("mean return of an evaluation")
    for agent, curve in agents.items():
        shown = curve
        if len(curve) >= 2 * SMOOTHING:
            _line(axis, curve, color=agent_colour(agent, of=len(agents)), linewidth=0.8, alpha=0.35)
            shown = Series(curve.step, smoothed(curve.value))
        _agent_line(axis, agent, shown, name=name(agent), of=len(agents))
    shared = shared_curves(list(agents.values()))
    if len(agents) > 1 and len(shared.step):
        smooth = len(shared.step) >= 2 * SMOOTHING
        style = {"color": INK, "linewidth": 2, "label": "mean over agents"}
        mean_curve(axis, shared.step, shared.value, smooth=smooth, shade=0.1, **style)
    last = max(int(curve.step[-1]) for curve in agents.values())
    for index, row in enumerate(published):
        points = [point for point in row.points if point.step <= last]
        published_points(axis, row, points, name=row.method, marker=MARKERS[index % len(MARKERS)])
    axis.set_xlim(left=0, right=last * 1.02 or 1)
    return sheet.svg()


def similarity_over_time(agents: Mapping[int, Records]) -> str | None:
    """The λ that weighed and that of each collecting agent over time, a panel per learner, of the first."""
    table = {
        agent: [
            *((source, series, "solid") for source, series in peers_of(agent, records).items()),
            (None, column(records, "similarity_weight"), (0, (3, 1))),
        ]
        for agent, records in agents.items()
    }
    sheet = _by_learner(table, "similarity weight λ", shown=lambda value: value.clip(LOWEST_WEIGHT, LARGEST))
    if sheet is None:
        return None
    for axis in sheet.axes:
        axis.set_ylim(LOWEST_WEIGHT / 1.5, 1.5)
        axis.yaxis.set_major_locator(LogLocator(10, numticks=6))
        axis.yaxis.set_minor_locator(NullLocator())
    return sheet.svg()


def source_terms(agents: Mapping[int, Records]) -> str | None:
    """Both summands of ρ of each collecting agent over time, a panel per learner, of the first."""
    styles = {"divergence_covariance_by_source": "solid", "divergence_mean_by_source": (0, (1, 1.5))}
    table = {
        agent: [
            (source, _positive(series), style)
            for key, style in styles.items()
            for source, series in peers_of(agent, records, key).items()
        ]
        for agent, records in agents.items()
    }
    sheet = _by_learner(table, "terms of ρ (nats)")
    if sheet is None:
        return None
    _whole_decades(sheet.axes[0])  # they share it
    return sheet.svg()


def divergence_terms(agents: Mapping[int, Records]) -> str | None:
    """Both summands of the divergence over time: what the covariance and what the mean contributes."""
    terms = {"covariance term of ρ": "divergence_covariance", "mean term of ρ": "divergence_mean"}

    def logarithmic(axes: Sequence[Axes]) -> None:
        for axis in axes:
            axis.set_yscale("log")
        _whole_decades(axes[0])  # they share it

    return _panels(agents, terms, share_y=True, positive=True, finish=logarithmic)


def distillation(agents: Mapping[int, Records], *, name: Names) -> str | None:
    """How many states of a batch each agent distilled on over time, and how much each of them weighed."""
    return _panels(agents, {"share of states": "distilled_share", "confidence": "confidence"}, name=name)


def sharing(agents: Mapping[int, Records], batch_sizes: Collection[int], *, name: Names) -> str | None:
    """How much external transitions count over time: their share of the loss weight, and Σ w / max w."""
    keys = {"external share of the loss weight": "external_share", "effective batch": "effective_batch"}

    def bounded(axes: Sequence[Axes]) -> None:
        share, effective = axes
        share.set_ylim(-0.02, 1.02)
        for size in batch_sizes:
            effective.axhline(size, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="batch size")
        effective.set_ylim(0, max(batch_sizes) * 1.05)

    return _panels(agents, keys, name=name, finish=bounded)


def sampling(agents: Mapping[int, Records], *, name: Names) -> str | None:
    """What batches hold over time: the share of own transitions, and the effective sample of the loss."""
    return _panels(agents, {"own share": "own_share", "effective sample": "effective_sample_size"}, name=name)


def priorities(agents: Mapping[int, Records], *, name: Names) -> str | None:
    """The largest and the mean priority of each agent over time; None where it has none."""
    keys = {"largest priority": "largest_priority", "mean priority": "mean_priority"}
    return _panels(agents, keys, name=name, share_y=True, positive=True)


def throughput(agents: Mapping[int, Records], *, name: Names) -> str | None:
    """Updates and environment steps per second of each agent over time."""
    rates = {"updates per second": "updates_per_second", "environment steps per second": "steps_per_second"}
    return _panels(agents, rates, share_y=True, name=name, finish=lambda axes: axes[0].set_ylim(bottom=0))


def losses(agents: Mapping[int, Records], *, name: Names) -> str | None:
    """Critic loss and mean action value of each agent over time."""
    return _panels(agents, {"critic loss": "critic_loss", "mean Q of a batch": "q_mean"}, name=name)


def buffer_fill(agents: Mapping[int, Records], capacity: int | None) -> str | None:
    """Transitions in the shared buffer, as the agent with the most records saw it; `capacity` where known."""
    longest = max((column(records, "buffer_size") for records in agents.values()), key=len, default=None)
    if not longest:
        return None
    series = drawable(longest)
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


def mean_curve(axis: Axes, step: Ints, values: Floats, *, smooth: bool, shade: float, **style: Any) -> None:
    """The mean of curves (K, N), and half their standard deviation shaded."""
    values = smoothed(values) if smooth else values
    mean, half = mean_of(values), spread(values) / 2
    axis.fill_between(step, mean - half, mean + half, color=style["color"], alpha=shade, linewidth=0)
    axis.plot(step, mean, **style)


def published_points(
    axis: Axes,
    row: PublishedRow,
    points: Sequence[PublishedPoint],
    *,
    name: str,
    marker: str,
    colour: str = MUTED,
    paper: str = PAPER,
) -> None:
    """Dots with half a standard deviation; hollow where the row carries no information of its own."""
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
        label=f"published: {name}{' (combination)' if row.combined else ''}",
        zorder=4,
    )


def _whole_decades(axis: Axes) -> None:
    """Widens a logarithmic axis to powers of ten, so that at least two of its ticks have a label."""
    lowest, highest = axis.get_ylim()
    low = math.floor(math.log10(lowest))
    high = max(math.ceil(math.log10(highest)), low + 1)
    step = math.ceil((high - low) / 5)
    axis.yaxis.set_major_locator(FixedLocator([10.0**power for power in range(low, high + 1, step)]))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_ylim(10.0**low, 10.0**high)


def _by_learner(
    table: Mapping[int, Sequence[tuple[int | None, Series, Any]]],
    label: str,
    *,
    shown: Callable[[Floats], Floats] = lambda value: value,
) -> Sheet | None:
    """A logarithmic panel for each of the first learners with any line: (from which agent, line, style).

    None stands for what was used of all agents together.
    """
    panels = [each for each in table.items() if any(len(series) for _, series, _ in each[1])][:_LEARNERS]
    if not panels:
        return None
    sheet = Sheet(len(panels), height_in=2.9, share_y=True)
    sheet.axes[0].set_ylabel(label)
    for axis, (agent, lines) in zip(sheet.axes, panels, strict=True):
        axis.set_yscale("log")
        axis.set_xlabel(f"environment steps of agent {agent}")
        for source, series, style in lines:
            line = Series(series.step, shown(series.value))
            if source is not None:
                name = f"from agent {source}"
                _agent_line(axis, source, line, name=name, of=len(table), linestyle=style)
            elif len(series):
                _line(axis, line, color=INK, label="weight used", linewidth=1.5, linestyle=style)
        axis.set_xlim(left=0)
    return sheet


def _panels(
    agents: Mapping[int, Records],
    panels: Mapping[str, str],
    *,
    share_y: bool = False,
    positive: bool = False,
    name: Names = "agent {}".format,
    finish: Callable[[Sequence[Axes]], Any] = lambda axes: None,
) -> str | None:
    """One panel for each (label, key), one line for each agent; None where no record has any of them.

    With `positive`, other numbers are left out, as a logarithmic scale asks for.
    """
    table = [
        (position, agent, (_positive if positive else drawable)(column(records, key)))
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
    finish(sheet.axes)
    return sheet.svg()


def _positive(series: Series) -> Series:
    """What a logarithmic scale can show."""
    kept = series.value > 0
    return Series(series.step[kept], series.value[kept].clip(10.0**-_DECADES, 10.0**_DECADES))


def _agent_line(
    axis: Axes, agent: int, series: Series, *, name: str, of: int, linestyle: Any = "solid"
) -> None:
    colour, style = agent_colour(agent, of=of), {"label": name, "alpha": 1.0, "linewidth": 1.5}
    if of > NAMED_AGENTS:
        style = {"label": None, "alpha": 0.35, "linewidth": 0.9}
    _line(axis, series, color=colour, linestyle=linestyle, **style)


def _line(axis: Axes, series: Series, **style: Any) -> None:
    dot = "o" if len(series) == 1 else None
    axis.plot(series.step, series.value, marker=dot, markersize=3, **style)
