"""Matplotlib figures as inline SVG that takes its text, ink and grid colours from the page around it."""

import io
import re
from typing import Any, Final

import matplotlib as mpl
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
}


class Sheet:
    """One row of axes; `svg` closes it. Uses no state of pyplot."""

    def __init__(self, columns: int = 1, *, height_in: float = 3.1, share_y: bool = False) -> None:
        with mpl.rc_context(_STYLE):
            self._figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained", facecolor="none")
            engine = self._figure.get_layout_engine()
            if engine is not None:
                engine.set(w_pad=0.1, wspace=0.04)  # type: ignore[call-arg]  # a constrained one
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
            for axis in self.axes:
                _legend_above(axis, ncols=_LEGEND_COLUMNS // len(self.axes))
            self._figure.savefig(text, format="svg", metadata=nothing, transparent=True)
        return _inline(text.getvalue())


def agent_style(agent: int, *, agents: int, alpha: float = 1.0) -> dict[str, Any]:
    """How an agent's line looks, the same in every picture; too many to tell apart become one grey."""
    if agents > NAMED_AGENTS:
        return {"color": MUTED, "alpha": 0.4 * alpha, "linewidth": 0.9}
    return {"color": PALETTE[agent % len(PALETTE)], "alpha": alpha}


def over_steps(axis: Axes) -> None:
    """Labels the horizontal axis as environment steps."""
    axis.set_xlabel("environment steps of each agent")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))


def thousands(value: float) -> str:
    """A short form of a number of steps: 1500 is 1.5k, 2000000 is 2M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _legend_above(axis: Axes, *, ncols: int) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=max(1, ncols), borderaxespad=0.2, fontsize=8
        )


def _inline(document: str) -> str:
    """The `<svg>` element without prolog, fixed size and fonts; the page decides those."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r'(<svg\b[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"<style type=\"text/css\">.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)
    for stand_in, page_colour in _PAGE_COLOURS.items():
        svg = svg.replace(stand_in, page_colour)
    return svg.strip()
