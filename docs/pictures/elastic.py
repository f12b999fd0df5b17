"""Draws timelines of the workers of an elastic job: a step, a recovery, and a worker that joins.

python docs/pictures/elastic.py        writes the SVG files next to this script
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Bar:
    """An activity of one worker from `start` to `end`, in the time unit of the picture."""

    row: int
    start: float
    end: float
    text: str
    kind: str


@dataclass(frozen=True)
class Instant:
    """An event that affects all workers at the same time."""

    at: float
    text: str


COLORS = {
    "compute": "#0369a1",
    "sum": "#15803d",
    "vote": "#a16207",
    "step": "#6d28d9",
    "wait": "#64748b",
    "dead": "#b91c1c",
}
LEFT, ROW, BAR, TOP, UNIT = 120, 46, 30, 78, 84
STYLE = """
.paper { fill: #ffffff } .ink { fill: #1f2430 } .quiet { fill: #5b6472 } .line { stroke: #c3c9d4 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #161b22 } .ink { fill: #e6e9ef } .quiet { fill: #9aa4b2 } .line { stroke: #3a4350 }
}
"""


def everybody(rows: range, start: float, end: float, text: str, kind: str) -> list[Bar]:
    """Returns the same bar for several workers."""
    return [Bar(row, start, end, text, kind) for row in rows]


STEP = [
    *(Bar(row, 0, 2.2 + 0.1 * (row % 2), f"shards {2 * row}, {2 * row + 1}", "compute") for row in range(4)),
    *everybody(range(4), 2.4, 3.6, "sum", "sum"),
    *everybody(range(4), 3.7, 4.3, "vote", "vote"),
    *everybody(range(4), 4.4, 5.6, "optimizer", "step"),
    *everybody(range(4), 5.7, 7.4, "the next batch", "compute"),
]
STEP_INSTANTS = [Instant(2.35, "sums are stored"), Instant(4.35, "committed")]

RECOVERY = [
    Bar(0, 0, 2.2, "shards 0, 1", "compute"),
    Bar(1, 0, 2.3, "shards 2, 3", "compute"),
    Bar(2, 0, 1.4, "shards 4, 5", "compute"),
    Bar(2, 1.4, 1.9, "killed", "dead"),
    Bar(3, 0, 2.2, "shards 6, 7", "compute"),
    *(Bar(row, 2.4, 3.3, "new view", "wait") for row in (0, 1, 3)),
    Bar(0, 3.4, 4.4, "shard 4", "compute"),
    Bar(1, 3.4, 4.4, "shard 5", "compute"),
    Bar(3, 3.4, 4.4, "", "wait"),
    *(Bar(row, 4.5, 5.5, "sum", "sum") for row in (0, 1, 3)),
    *(Bar(row, 5.6, 6.1, "vote", "vote") for row in (0, 1, 3)),
    *(Bar(row, 6.2, 7.2, "optimizer", "step") for row in (0, 1, 3)),
    Bar(2, 2.9, 7.2, "another worker replaces it and catches up", "wait"),
    *everybody(range(4), 7.4, 8.3, "new view", "wait"),
    *everybody(range(4), 8.4, 9.6, "the next batch", "compute"),
]
RECOVERY_INSTANTS = [Instant(1.45, "SIGKILL"), Instant(7.3, "a batch begins: the new worker joins")]

JOINING = [
    *(bar for at in range(4) for bar in everybody(range(3), 1.7 * at, 1.7 * at + 1.6, f"batch {at}", "compute")),
    Bar(3, 0, 1.6, "starts", "wait"),
    Bar(3, 1.9, 4.4, "chunks of the state from 0 and 1", "sum"),
    Bar(3, 4.5, 5.2, "batch 1", "step"),
    Bar(3, 5.3, 6.0, "batch 2", "step"),
    Bar(3, 6.1, 6.7, "3", "step"),
    *everybody(range(4), 6.8, 7.7, "new view", "wait"),
    *everybody(range(4), 7.8, 9.4, "batch 4", "compute"),
]
JOINING_INSTANTS = [Instant(1.65, "workers 0 and 1 fork"), Instant(6.75, "the new worker has replayed all results")]


def text(x: float, y: float, words: str, size: float, look: str, more: str = "") -> str:
    """Returns a line of text."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" class="{look}"{more}>{escape(words)}</text>'


def draw_bar(bar: Bar) -> list[str]:
    """Returns a colored bar with centered text."""
    x, y = LEFT + bar.start * UNIT, TOP + bar.row * ROW
    width = (bar.end - bar.start) * UNIT
    faint = ' fill-opacity="0.75"' if bar.kind == "wait" else ""
    shapes = [f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{BAR}" rx="5" fill="{COLORS[bar.kind]}"{faint}/>']
    if bar.text:
        middle = ' fill="#ffffff" text-anchor="middle" font-size="12.5"'
        shapes.append(f'<text x="{x + width / 2:g}" y="{y + 20}"{middle}>{escape(bar.text)}</text>')
    return shapes


def svg(title: str, bars: list[Bar], instants: list[Instant]) -> str:
    """Returns a picture with a row for each worker as SVG."""
    wide = LEFT + max(bar.end for bar in bars) * UNIT + 24
    high = TOP + 4 * ROW + 34
    shapes = [text(20, 32, title, 16, "ink")]
    for row in range(4):
        shapes.append(text(20, TOP + row * ROW + 20, f"worker {row}", 13.5, "ink"))
    for instant in instants:
        x = LEFT + instant.at * UNIT
        shapes.append(f'<line x1="{x:g}" y1="{TOP - 12}" x2="{x:g}" y2="{high - 30}" class="line" stroke-width="2"/>')
        shapes.append(text(x, high - 14, instant.text, 12, "quiet", ' text-anchor="middle"'))
    for bar in bars:
        shapes += draw_bar(bar)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high}" width="{wide:g}" height="{high}" '
            'font-family="Helvetica, Arial, sans-serif" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{wide:g}" height="{high}" rx="10" class="paper"/>',
            *shapes,
            "</svg>\n",
        ]
    )


PICTURES = {
    "elastic-step.svg": lambda: svg("A step of eight shards on four workers", STEP, STEP_INSTANTS),
    "elastic-recovery.svg": lambda: svg("Worker 2 is killed in the middle of a step", RECOVERY, RECOVERY_INSTANTS),
    "elastic-joining.svg": lambda: svg("Worker 3 joins while the others train", JOINING, JOINING_INSTANTS),
}


def main() -> None:
    """Writes the SVG files."""
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw())


if __name__ == "__main__":
    main()
