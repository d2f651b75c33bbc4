"""Matplotlib figures as inline SVG that takes its text, ink and grid colours from the page around it."""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

# Stand-ins that `Sheet.svg` turns into the page's colours, so one picture fits a light and a dark page.
INK, MUTED, GRID, PAPER = "#010203", "#010204", "#010205", "#010206"
_PAGE_COLOURS: Final = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}


@dataclass(frozen=True)
class Inks:
    """The colours of a drawing that are not data's."""

    ink: str
    muted: str
    grid: str
    paper: str


PAGE: Final = Inks(INK, MUTED, GRID, PAPER)
"""Those of the page around the drawing, light or dark."""
PRINT: Final = Inks("#1d2126", "#636b74", "#dfe2e5", "#ffffff")
"""Those of a file of its own."""
# Told apart by hue and by lightness, readable on white and on near-black.
_BLUE_TO_PINK: Final = ("#3b7dd8", "#e07b39", "#2f9e6e", "#c94f7c", "#8a63d2")
_OCHRE_TO_GREY: Final = ("#b08a1e", "#2a9db0", "#c2513f", "#6f8f3a", "#7d7f8c")
PALETTE: Final = (*_BLUE_TO_PINK, *_OCHRE_TO_GREY)
NAMED_AGENTS: Final = len(PALETTE)
"""Up to this many agents are told apart by colour and name."""
_NOT_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_WIDTH_IN: Final = 9.2
_LEGEND_COLUMNS: Final = 6
# Any keys: matplotlib's newer stubs list every name, its older ones say str.
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dase",
    "text.parse_math": False,
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.6,
    "xtick.minor.visible": False,
    "ytick.minor.visible": False,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.fontsize": 8,
    "legend.borderaxespad": 0.2,
    "legend.borderpad": 0.2,
}


class Sheet:
    """A grid of axes; `svg` or `png` closes it. Uses no state of pyplot.

    Attributes:
        figure: the drawing.
        axes: row by row.
    """

    def __init__(
        self,
        columns: int = 1,
        rows: int = 1,
        *,
        height_in: float = 3.1,
        width_in: float = _WIDTH_IN,
        share_y: bool = False,
        inks: Inks = PAGE,
        legend_columns: int = _LEGEND_COLUMNS,
        sort_names: bool | None = None,
    ) -> None:
        self._style = {**_STYLE, **_colours(inks)}
        self._legend_columns = legend_columns
        # Where each panel leaves out another agent, only the names together have an order.
        self._sort_names = columns > 1 if sort_names is None else sort_names
        with mpl.rc_context(self._style):
            self.figure = Figure(figsize=(width_in, height_in), facecolor="none")
            self.figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.05, wspace=0.05)
            axes = self.figure.subplots(rows, columns, squeeze=False, sharey=share_y)
            self.axes: list[Axes] = list(axes.flat)
            for axis in self.axes:
                axis.set_facecolor("none")
                axis.set_xlabel("environment steps of each agent")
                axis.xaxis.set_major_formatter(THOUSANDS)

    def svg(self) -> str:
        """The drawing as an `<svg>` element for an HTML page; the same figure gives the same text."""
        return _inline(self._saved("svg", transparent=True).decode())

    def svg_file(self) -> bytes:
        """The drawing as an SVG file; the same figure gives the same bytes."""
        return self._saved("svg", facecolor=PRINT.paper)

    def png_file(self, *, dots_per_inch: int = 150) -> bytes:
        """The drawing as a PNG file."""
        return self._saved("png", facecolor=PRINT.paper, dpi=dots_per_inch)

    def _saved(self, kind: str, **options: Any) -> bytes:
        data = io.BytesIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type") if kind == "svg" else ("Software",))
        with mpl.rc_context(self._style), _any_text():
            self._legend()
            if kind == "svg":
                self._lay_out()
            self.figure.savefig(data, format=kind, metadata=nothing, **options)
        return xml_text(data.getvalue().decode()).encode() if kind == "svg" else data.getvalue()

    def _lay_out(self) -> None:
        """Gives all axes their places, as `savefig` would, which then draws everything once and not twice."""
        engine = self.figure.get_layout_engine()
        if engine is not None:
            FigureCanvasSVG(self.figure)
            self.figure.dpi = 72  # as that canvas draws
            engine.execute(self.figure)
            self.figure.set_layout_engine(None)

    def _legend(self) -> None:
        """One legend above all axes; a name that several of them use is said once."""
        named: dict[str, Artist] = {}
        for axis in self.axes:
            shown, labels = axis.get_legend_handles_labels()
            named.update(zip(labels, shown, strict=True))
        names = sorted(named, key=lambda name: (len(name), name)) if self._sort_names else list(named)
        if names and not self.figure.legends:
            handles = [named[name] for name in names]
            self.figure.legend(handles, names, loc="outside upper left", ncols=self._legend_columns)


def agent_colour(agent: int, *, of: int) -> str:
    """An agent's colour, the same in every picture; one grey where there are too many to tell apart."""
    return PALETTE[agent % len(PALETTE)] if of <= NAMED_AGENTS else MUTED


def _colours(inks: Inks) -> dict[Any, Any]:
    return {
        "text.color": inks.ink,
        "axes.titlecolor": inks.ink,
        **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), inks.muted),
        **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), inks.grid),
    }


def thousands(value: float) -> str:
    """A short form of a count: 1500 is 1.5k, 2000000 is 2M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


THOUSANDS: Final = FuncFormatter(lambda value, _: thousands(value))


def xml_text(text: str) -> str:
    """The text with a sign for each character that no XML may hold, as control characters in a name."""
    return _NOT_XML.sub("\ufffd", text)


@contextmanager
def _any_text() -> Iterator[None]:
    """Lets names have characters that Matplotlib's font lacks: a page shows them, a PNG shows boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+|Matplotlib currently does not support", UserWarning)
        yield


def _inline(document: str) -> str:
    """The `<svg>` element without prolog, fixed size and fonts; the page decides those."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"<style type=\"text/css\">.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)
    for stand_in, name in _PAGE_COLOURS.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return svg.strip()
