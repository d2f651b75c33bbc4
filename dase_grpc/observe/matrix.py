"""The similarity λ of every pair of agents: a table that is a heat map, or one line where K is large."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from dase_grpc.observe.cells import NOTHING
from dase_grpc.observe.view import AgentView
from dase_grpc.progress import LOWEST_WEIGHT, several, weight

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
