"""Pages from their templates, pieces of them, and numbers as they stand there; every text is escaped."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dase_grpc.progress import LOWEST_WEIGHT
from dase_grpc.runs.logs import Floats

NUMBERED_CELLS: Final = 12
SHOWN_CELLS: Final = 64


def page(
    template: str, *, title: str, heading: str, subtitle: str, facts: Mapping[str, str], **values: Any
) -> str:
    """The whole page, which needs nothing beside it; values are what the template names besides."""
    found = _templates().get_template(template)
    return found.render(title=title, heading=heading, subtitle=subtitle, facts=facts, **values)


def note(text: str) -> Markup:
    """A few quiet sentences about what follows."""
    return _piece("note", text)


def empty(text: str) -> Markup:
    """The sentence that stands where there is nothing to show."""
    return _piece("empty", text)


def figure(svg: str | None, caption: str, *, otherwise: str) -> Markup:
    """A picture with its caption, or the sentence `otherwise` where there is none."""
    return empty(otherwise) if svg is None else _piece("figure", Markup(svg), caption)


def facts(values: Mapping[str, str]) -> Markup:
    """Names and values side by side."""
    return _piece("facts", values)


def folded(title: str, text: str) -> Markup:
    """Text as it is, shown on a click."""
    return _piece("folded", title, text)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, total: bool = False) -> Markup:
    """A table whose first column is text and whose others are numbers; `total` sets the last row apart."""
    return _piece("table", columns, rows, total=total)


def heat_map(ids: Sequence[int], weights: Floats) -> Markup:
    """A heat map of (K, K) similarity weights on a logarithmic scale, learners down, collectors across."""
    shown = range(min(len(ids), SHOWN_CELLS))
    numbered = len(ids) <= NUMBERED_CELLS
    rows = [
        [None if row == column else _weight(weights[row, column], numbered=numbered) for column in shown]
        for row in shown
    ]
    return _piece("heat_map", ids[:SHOWN_CELLS], rows)


def number(value: float | None, digits: int = 1) -> str:
    """A number for a table; a dash for None and NaN."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.{digits}f}".replace("-", "−")


def digits(values: Floats) -> int:
    """How many decimals all numbers of a table get: more where all of them are small."""
    largest = np.abs(values[np.isfinite(values)]).max(initial=0.0)
    if largest >= 10 or largest == 0:
        return 1
    return 2 if largest >= 1 else 3


def spread(mean: float, std: float) -> str:
    """A mean and its standard deviation."""
    return f"{number(mean, 0)} ± {number(std, 0)}"


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


def _piece(name: str, *values: Any, **named: Any) -> Markup:
    """A macro of pieces.html, filled."""
    filled: Markup = getattr(_templates().get_template("pieces.html").module, name)(*values, **named)
    return filled


@cache
def _templates() -> Environment:
    """The templates beside this module, which escape what is put into them."""
    found = Environment(
        loader=PackageLoader("dase_grpc.runs.reports", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["lines"] = lambda text: Markup("<br>").join(str(text).split("\n"))
    return found
