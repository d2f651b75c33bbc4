"""Pieces of the report's HTML page; every text that comes in is escaped here, pictures are not."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Final

import numpy as np

from dase_grpc.progress import LOWEST_WEIGHT
from dase_grpc.runs.logs import Floats

TEMPLATE: Final = "report_template.html"
NUMBERED_CELLS: Final = 12
SHOWN_CELLS: Final = 64


@dataclass(frozen=True)
class Markup:
    """HTML that is ready to be put into a page."""

    html: str


def document(title: str, *parts: Markup) -> str:
    """The whole page, which needs nothing beside it."""
    template = (resources.files("dase_grpc.runs.reports") / TEMPLATE).read_text(encoding="utf-8")
    body = "\n".join(part.html for part in parts)
    return Template(template).substitute(title=escape(title), body=body)


def header(title: str, subtitle: str) -> Markup:
    """The page's head line and what stands under it."""
    return Markup(f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>")


def section(title: str, *parts: Markup) -> Markup:
    """A titled section."""
    body = "\n".join(part.html for part in parts)
    return Markup(f"<section><h2>{escape(title)}</h2>\n{body}\n</section>")


def note(text: str) -> Markup:
    """A few quiet sentences about what follows, or lines."""
    return Markup(f'<p class="note">{escape(text)}</p>'.replace("\n", "<br>"))


def empty(text: str) -> Markup:
    """The sentence that stands where there is nothing to show."""
    return Markup(f'<p class="empty">{escape(text)}</p>')


def figure(svg: str | None, caption: str, *, otherwise: str) -> Markup:
    """A picture with its caption, or the sentence `otherwise` where there is none."""
    if svg is None:
        return empty(otherwise)
    return Markup(f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>")


def facts(values: Mapping[str, str]) -> Markup:
    """Names and values side by side."""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items()
    )
    return Markup(f'<dl class="facts">{items}</dl>')


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,), total: bool = False
) -> Markup:
    """A table whose columns hold numbers but for `words`; `total` sets the last row apart."""
    kinds = [' class="words"' if index in words else "" for index in range(len(columns))]
    head = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(columns, kinds, strict=True)
    )
    body = "".join(
        f'<tr><th scope="row"{kinds[0]}>{escape(name)}</th>'
        + "".join(
            f"<td{kind}>{escape(cell)}</td>".replace("\n", "<br>")
            for cell, kind in zip(cells, kinds[1:], strict=True)
        )
        + "</tr>"
        for name, *cells in rows
    )
    sort = ' class="total"' if total else ""
    return Markup(
        f'<div class="wide"><table{sort}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def heat_map(ids: Sequence[int], weights: Floats) -> Markup:
    """A heat map of (K, K) similarity weights on a logarithmic scale, learners down, collectors across."""
    shown = range(min(len(ids), SHOWN_CELLS))
    head = "".join(f'<th scope="col">{ids[column]}</th>' for column in shown)
    body = "".join(
        f'<tr><th scope="row">{ids[row]}</th>'
        + "".join(
            _weight_cell(weights[row, column], own=row == column, numbered=len(ids) <= NUMBERED_CELLS)
            for column in shown
        )
        + "</tr>"
        for row in shown
    )
    corner = '<th class="corner">learns ↓ from →</th>'
    return Markup(
        f'<div class="wide"><table class="heat"><thead><tr>{corner}{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def folded(title: str, part: Markup) -> Markup:
    """Something that is shown on a click."""
    return Markup(f"<details><summary>{escape(title)}</summary>{part.html}</details>")


def preformatted(text: str) -> Markup:
    """Text as it is."""
    return Markup(f"<pre>{escape(text)}</pre>")


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


def _weight_cell(weight: float, *, own: bool, numbered: bool) -> str:
    if own:
        return '<td class="own"></td>'
    if not math.isfinite(weight):
        return "<td>–</td>" if numbered else "<td></td>"
    depth = 1 - math.log10(max(weight, LOWEST_WEIGHT)) / math.log10(LOWEST_WEIGHT)
    text = weight_text(weight)
    return f'<td style="--depth:{depth:.3f}" title="λ = {weight:.3g}">{text if numbered else ""}</td>'
