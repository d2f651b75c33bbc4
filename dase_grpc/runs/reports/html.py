"""Pages from their templates, which escape every text, and numbers as they stand there."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from dase_grpc.progress import LOWEST_WEIGHT
from dase_grpc.runs.logs import Floats
from dase_grpc.runs.reports.figures import xml_text

_LONG: Final = 1e15
"""Numbers from here on have too many digits to be read."""
NUMBERED_CELLS: Final = 12
SHOWN_CELLS: Final = 64


@dataclass(frozen=True)
class Table:
    """A table for a reader; a cell may have several lines, and a line may be wrapped at its spaces.

    Attributes:
        words: the columns that hold words; the others hold numbers.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: tuple[int, ...] = (0,)


def page(
    template: str, *, title: str, heading: str, subtitle: str, facts: Mapping[str, str], **values: Any
) -> str:
    """The whole page, which needs nothing beside it; values are what the template names besides."""
    found = _templates().get_template(template)
    return xml_text(found.render(title=title, heading=heading, subtitle=subtitle, facts=facts, **values))


def heat_map(weights: Floats) -> list[list[dict[str, Any] | None]]:
    """The cells of (K, K) similarity weights on a logarithmic scale; None on the diagonal."""
    shown = range(min(len(weights), SHOWN_CELLS))
    numbered = len(weights) <= NUMBERED_CELLS
    return [
        [None if row == column else _weight(weights[row, column], numbered=numbered) for column in shown]
        for row in shown
    ]


def number(value: float | None, digits: int = 1) -> str:
    """A number for a table; a dash for None and NaN."""
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:,.{digits}f}" if abs(value) < _LONG else f"{value:.3e}"
    return text.replace("-", "−")


def digits(values: Floats) -> int:
    """How many decimals all numbers of a table get: more where all of them are small."""
    largest = np.abs(values[np.isfinite(values)]).max(initial=0.0)
    if largest >= 10 or largest == 0:
        return 1
    return 2 if largest >= 1 else 3


def weight_text(weight: float) -> str:
    """A similarity weight in a few characters: 0.42, 3e−05, 0."""
    if weight == 0 or weight >= 0.01:
        return f"{weight:.2g}"
    return f"{weight:.0e}".replace("-", "−")


def _weight(weight: float, *, numbered: bool) -> dict[str, Any]:
    if not math.isfinite(weight):
        return {"text": "–" if numbered else "", "depth": None}
    depth = 1 - math.log10(max(weight, LOWEST_WEIGHT)) / math.log10(LOWEST_WEIGHT)
    return {"text": weight_text(weight) if numbered else "", "depth": depth, "title": f"{weight:.3g}"}


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("dase_grpc.runs.reports", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
