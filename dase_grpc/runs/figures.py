"""Matplotlib figures as inline SVG that takes its text, ink and grid colours from the page around it."""

import io
import re
from typing import Any, Final

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

# Stand-ins that `to_svg` turns into the page's colours, so one picture fits a light and a dark page.
INK: Final = "#010203"
MUTED: Final = "#010204"
GRID: Final = "#010205"
PAPER: Final = "#010206"
_PAGE_COLOURS: Final = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    PAPER: "var(--paper)",
}
# Told apart by hue and by lightness, readable on white and on near-black.
PALETTE: Final = (
    "#3b7dd8",
    "#e07b39",
    "#2f9e6e",
    "#c94f7c",
    "#8a63d2",
    "#b08a1e",
    "#2a9db0",
    "#c2513f",
    "#6f8f3a",
    "#7d7f8c",
)
NAMED_AGENTS: Final = len(PALETTE)
"""Up to this many agents are told apart by colour and name."""
_WIDTH_IN: Final = 9.2
_LEGEND_COLUMNS: Final = 6
# Any keys: matplotlib's newer stubs list every name, its older ones say str.
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dase",
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
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
    """One row of axes; `svg` closes it. Uses no state of pyplot."""

    def __init__(self, columns: int = 1, *, height_in: float = 3.1, share_y: bool = False) -> None:
        with mpl.rc_context(_STYLE):
            self._figure = Figure(figsize=(_WIDTH_IN, height_in), facecolor="none")
            self._figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.05, wspace=0.05)
            axes = self._figure.subplots(1, columns, squeeze=False, sharey=share_y)
            self.axes: list[Axes] = list(axes[0])
            for axis in self.axes:
                axis.set_facecolor("none")
                over_steps(axis)

    def svg(self) -> str:
        """The drawing as an `<svg>` element for an HTML page; the same figure gives the same text."""
        text = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        with mpl.rc_context(_STYLE):
            self._legend()
            self._figure.savefig(text, format="svg", metadata=nothing, transparent=True)
        return _inline(text.getvalue())

    def _legend(self) -> None:
        """One legend above all axes; a name that several of them use is said once."""
        named: dict[str, Artist] = {}
        for axis in self.axes:
            shown, labels = axis.get_legend_handles_labels()
            named.update(zip(labels, shown, strict=True))
        # Each panel leaves out another agent, so only the names together have an order.
        names = sorted(named, key=lambda name: (len(name), name)) if len(self.axes) > 1 else list(named)
        if names:
            handles = [named[name] for name in names]
            self._figure.legend(handles, names, loc="outside upper left", ncols=_LEGEND_COLUMNS)


def agent_colour(agent: int, *, of: int) -> str:
    """An agent's colour, the same in every picture; one grey where there are too many to tell apart."""
    return PALETTE[agent % len(PALETTE)] if of <= NAMED_AGENTS else MUTED


def over_steps(axis: Axes) -> None:
    """Labels the horizontal axis as environment steps."""
    axis.set_xlabel("environment steps of each agent")
    axis.xaxis.set_major_formatter(THOUSANDS)


def thousands(value: float) -> str:
    """A short form of a count: 1500 is 1.5k, 2000000 is 2M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


THOUSANDS: Final = FuncFormatter(lambda value, _: thousands(value))


def _inline(document: str) -> str:
    """The `<svg>` element without prolog, fixed size and fonts; the page decides those."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"<style type=\"text/css\">.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)
    for stand_in, page_colour in _PAGE_COLOURS.items():
        svg = svg.replace(stand_in, page_colour)
    return svg.strip()
