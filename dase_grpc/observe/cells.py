"""Numbers as short texts, and the similarity of every pair of agents as a heat map."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Final, TypeGuard

from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from dase_grpc.observe.view import AgentView
from dase_grpc.progress import LOWEST_WEIGHT, Progress, number, several, weight

SHOWN_SOURCES: Final = 6
NOTHING: Final = "-"
"""Stands for a number that is not known yet, as in `number`."""

_SPARKS: Final = "▁▂▃▄▅▆▇█"

MAX_AGENTS: Final = 16
"""With more of them pairs are summed up."""

TITLE: Final = "similarity λ, row learns from column"
OWN: Final = "·"
WIDE: Final = 7
"""Columns that a pair takes, the space before it among them."""

NARROW: Final = 4
"""The same where only the power of ten of small ones is shown."""

_COLD, _WARM, _HOT = (33, 41, 66), (52, 120, 130), (250, 204, 92)
_DARK, _LIGHT = "#10131c", "#eef1f5"


def has_started(progress: Progress | None) -> TypeGuard[Progress]:
    """Whether the agent has joined and told its progress."""
    return progress is not None and progress.total_steps > 0


def has_ended(progress: Progress | None) -> bool:
    """Whether the agent will not go on."""
    return progress is not None and progress.state in ("finished", "stopped")


def agent_cells(agent_id: int, progress: Progress | None) -> dict[str, str]:
    """What an agent tells of itself, by the titles of a table's columns."""
    titles = ("step", "return", "evaluation", "first", "updates/s", "similarity λ")
    if not has_started(progress):
        return {**dict.fromkeys(titles, NOTHING), "state": "starting"}
    cells = (
        f"{progress.step:,}",
        number(progress.episode_return),
        number(progress.evaluation_return),
        number(progress.first_evaluation_return),
        f"{progress.updates_per_second:.0f}" if progress.updates_per_second else NOTHING,
        similarity_text(agent_id, progress),
    )
    return {**dict(zip(titles, cells, strict=True)), "state": progress.state}


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


def fits(agents: Sequence[AgentView]) -> bool:
    """Whether each pair is shown."""
    return 2 <= len(agents) <= MAX_AGENTS


def width_of(agents: Sequence[AgentView], *, wide: bool) -> int:
    """How many columns the table takes."""
    return max(len(TITLE), _label(agents) + len(agents) * (WIDE if wide else NARROW))


def height_of(agents: Sequence[AgentView]) -> int:
    """How many lines the table takes."""
    return 2 + len(agents)


def heat_map(agents: Sequence[AgentView], *, wide: bool = True) -> Group:
    """Rows learn from columns; a colour by the order of magnitude, and the number.

    One line for the title, one for the columns, one for each agent.
    """
    cell = (WIDE if wide else NARROW) - 1
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("", width=_label(agents) - 1, justify="right", no_wrap=True, header_style="dim")
    for agent in agents:
        table.add_column(str(agent.agent_id), width=cell, justify="right", no_wrap=True, header_style="dim")
    for learner in agents:
        cells = [_cell(learner, source.agent_id, wide=wide) for source in agents]
        table.add_row(Text(str(learner.agent_id), style="dim"), *cells)
    return Group(Text(TITLE, style="bold"), table)


def in_one_line(agents: Sequence[AgentView]) -> str:
    """The pairs summed up; an empty text where no similarity of another agent is known."""
    known = [
        (value, agent.agent_id, source)
        for agent in agents
        for source, value in agent.progress.similarity.items()
        if source != agent.agent_id
    ]
    if not known:
        return ""
    lowest, (highest, learner, source) = min(known)[0], max(known, key=lambda pair: pair[0])
    nil = sum(value < LOWEST_WEIGHT for value, *_ in known)
    return (
        f"similarity λ of {several(len(known), 'pair')}: median "
        f"{weight(median(value for value, *_ in known))}, "
        f"lowest {weight(lowest)}, highest {weight(highest)} ({learner} from {source}), "
        f"{nil:,} below {LOWEST_WEIGHT:g}"
    )


def short_weight(value: float) -> str:
    """A weight in three characters: 1, .21, e-5 for anything around 1e-05, ~0 for what can change nothing."""
    if value == 0:
        return "0"
    if value < LOWEST_WEIGHT:
        return "~0"
    if value < 0.01:
        return f"e{math.floor(math.log10(value))}"
    text = f"{value:.2f}"
    return text.removeprefix("0") if value < 0.995 else f"{value:.0f}"


def _cell(learner: AgentView, source: int, *, wide: bool) -> Text:
    value = learner.progress.similarity.get(source)
    if source == learner.agent_id:
        return Text(OWN, style="dim")
    if value is None:
        return Text(NOTHING, style="dim")
    return Text(weight(value) if wide else short_weight(value), style=_colours(value))


def _colours(value: float) -> Style:
    """From cold at the lowest weight that counts to hot at 1, by order of magnitude."""
    depth = 1 - math.log10(min(1.0, max(value, LOWEST_WEIGHT))) / math.log10(LOWEST_WEIGHT)
    low, high, share = (_COLD, _WARM, 2 * depth) if depth < 0.5 else (_WARM, _HOT, 2 * depth - 1)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return Style(color=_DARK if depth > 0.6 else _LIGHT, bgcolor=f"#{red:02x}{green:02x}{blue:02x}")


def _label(agents: Sequence[AgentView]) -> int:
    return 1 + max(len(str(agent.agent_id)) for agent in agents)
