"""An agent's and the buffer's numbers as short texts, the same on every screen."""

import math
from collections.abc import Sequence
from typing import Final, TypeGuard

from dase_grpc.progress import Progress, number, weight

SHOWN_SOURCES: Final = 6
NOTHING: Final = "-"
"""Stands for a number that is not known yet, as in `number`."""

_SPARKS: Final = "▁▂▃▄▅▆▇█"


def has_started(progress: Progress | None) -> TypeGuard[Progress]:
    """Whether the agent has joined and told its progress."""
    return progress is not None and progress.total_steps > 0


def has_ended(progress: Progress | None) -> bool:
    """Whether the agent will not go on."""
    return progress is not None and progress.state in ("finished", "stopped")


def agent_cells(agent_id: int, progress: Progress | None) -> tuple[str, str, str, str, str, str, str]:
    """Step, episode return, evaluation, first evaluation, updates/s, similarity, state."""
    if not has_started(progress):
        return (NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, "starting")
    return (
        f"{progress.step:,}",
        number(progress.episode_return),
        number(progress.evaluation_return),
        number(progress.first_evaluation_return),
        f"{progress.updates_per_second:.0f}" if progress.updates_per_second else NOTHING,
        similarity_text(agent_id, progress),
        progress.state,
    )


def weight_text(progress: Progress) -> str:
    """The λ that weighs what others collected."""
    return NOTHING if progress.similarity_weight is None else weight(progress.similarity_weight)


def similarity_text(agent_id: int, progress: Progress) -> str:
    """The λ that weighs, and in brackets that of each peer alone where there are several.

    For example "0.05 (1:0.21  2:3e-05)"; of a single peer both are the same. No space is within a
    pair, where a narrow table would break it (rich breaks at no-break spaces too).
    """
    others = [(source, value) for source, value in sorted(progress.similarity.items()) if source != agent_id]
    used = weight_text(progress)
    if len(others) < 2:
        return used
    shown = "  ".join(f"{source}:{weight(value)}" for source, value in others[:SHOWN_SOURCES])
    return f"{used} ({shown}{'  ...' if len(others) > SHOWN_SOURCES else ''})"


def buffer_text(size: int, capacity: int) -> str:
    """How full the buffer is."""
    if not capacity:
        return "buffer not open yet"
    return f"buffer {size:,} of {capacity:,} ({share(size, capacity)})"


def share(part: int, whole: int) -> str:
    """A part of a whole in percent: 0% and 100% only where it is none and all of it."""
    if 0 < part < 0.01 * whole:
        return "<1%"
    return ">99%" if 0.99 * whole < part < whole else f"{part / whole:.0%}"


def rate(per_second: float | None) -> str:
    """How many per second; a decimal where they are few."""
    if per_second is None:
        return NOTHING
    return f"{per_second:,.1f}" if 0 < per_second < 9.95 else f"{per_second:,.0f}"


def seconds(value: float) -> str:
    """How long ago something was, in a few characters: 0.4 s, 12 s, 7 min, 3 h."""
    for unit_s, unit in ((3_600, "h"), (60, "min")):
        if value >= 2 * unit_s:
            return f"{value / unit_s:,.0f} {unit}"
    return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The course of values in at most `width` characters, the latest last; a blank where none is known.

    The highest one is full, 0 is the lowest; where there are more values than characters, means are drawn.
    """
    means = _means(values, width)
    top = max((mean for mean in means if mean is not None), default=0.0)
    return "".join(" " if mean is None else _spark(mean, top) for mean in means)


def _means(values: Sequence[float | None], width: int) -> list[float | None]:
    each = max(1, math.ceil(len(values) / max(1, width)))
    ends = reversed(range(len(values), 0, -each))  # from the end, so that the latest is a mean of as many
    groups = [[value for value in values[max(0, end - each) : end] if value is not None] for end in ends]
    return [sum(group) / len(group) if group else None for group in groups]


def _spark(value: float, top: float) -> str:
    return _SPARKS[min(len(_SPARKS) - 1, int(value / top * len(_SPARKS)))] if top > 0 else _SPARKS[0]
