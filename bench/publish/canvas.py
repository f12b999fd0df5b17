"""Draws pictures with matplotlib, in colors that follow the reader's light or dark theme."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError("pictures are drawn with matplotlib, which is missing: pip install 'paceline[bench]'") from error

Axes = Any  # matplotlib's own classes are mostly untyped

INK, QUIET, LINE, PAPER = "#1f2430", "#5b6472", "#c3c9d4", "#ffffff"
BLUE, AMBER, GREEN, VIOLET, GRAY = "#0369a1", "#b45309", "#15803d", "#6d28d9", "#64748b"
_DARK = {
    INK: "#e6e9ef",
    QUIET: "#9aa4b2",
    LINE: "#3a4350",
    PAPER: "#161b22",
    BLUE: "#38bdf8",
    AMBER: "#fbbf24",
    GREEN: "#4ade80",
    VIOLET: "#c4b5fd",
    GRAY: "#94a3b8",
}
_COORDINATE = re.compile(r"-?\d+\.\d{3,}")  # coordinates with more decimals than are visible
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",
    "font.family": "DejaVu Sans",  # included in matplotlib, so texts have the same size on all machines
    "font.size": 9,
    "text.color": INK,
    "axes.titlesize": 10,
    "axes.titlecolor": INK,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": LINE,
    "axes.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": QUIET,
    "figure.facecolor": PAPER,
    "legend.frameon": False,
}


def picture(title: str, panels: int, paint: Any, width: float = 8.0, height: float = 3.2) -> str:
    """Returns an SVG.

    Args:
        title: The alternative text for readers who cannot see the picture.
        panels: The number of axes, side by side.
        paint: A function that draws on the given axes.
        width: The width in inches.
        height: The height in inches.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        paint(axes)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _finished(written.getvalue(), title)


def _finished(svg: str, title: str) -> str:
    """Returns the SVG with a title, the colors of the dark theme, and coordinates rounded to visible precision."""
    rules = "".join(
        f'[style*="{attribute}: {light}"]{{{attribute}:{dark} !important}}'
        for light, dark in _DARK.items()
        for attribute in ("fill", "stroke")
    )
    head = f"<title>{title}</title>\n<style>@media (prefers-color-scheme: dark){{{rules}}}</style>\n"
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\n?", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", lambda tag: _COORDINATE.sub(lambda match: f"{float(match[0]):.2f}", tag[0]), svg)
    at = svg.index(">") + 1
    return "\n".join(line.rstrip() for line in (svg[:at] + "\n" + head + svg[at:].lstrip("\n")).split("\n"))


def bars(axes: Axes, groups: Sequence[str], series: dict[str, tuple[str, list[float | None]]], unit: str) -> None:
    """Draws groups of bars with the value above each bar; a value of None is omitted.

    Args:
        axes: The axes to draw on.
        groups: The names of the groups.
        series: For each name, its color and a value for each group.
        unit: The unit of the values, used as the axis label.
    """
    width = 0.8 / len(series)
    for at, (name, (color, values)) in enumerate(series.items()):
        places = [group + (at - (len(series) - 1) / 2) * width for group in range(len(groups))]
        shown = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
        axes.bar([place for place, _ in shown], [value for _, value in shown], 0.9 * width, color=color, label=name)
        for place, value in shown:
            axes.text(place, value, f"{value:.3g}", ha="center", va="bottom", fontsize=7, color=QUIET)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(unit)
    axes.grid(False, axis="x")
    axes.legend(fontsize=8, ncols=len(series), loc="lower center", bbox_to_anchor=(0.5, 1.0))
