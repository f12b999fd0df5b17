"""Draws the data on four ranks before and after each collective, computed with Paceline's schedules.

python docs/pictures/collectives.py        writes the SVG files next to this script
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

from playing import Data, State, play

from paceline.comm.schedule.steps import Buffer, Operation

RANKS = 4
LETTERS = "ABCD"
COLORS = ("#0369a1", "#15803d", "#a16207", "#b91c1c")
SUM = "#6d28d9"
LEFT, TOP, ROW, BOX, GAP, ARROW = 80, 66, 44, 30, 6, 90
STYLE = """
.paper { fill: #ffffff } .ink { fill: #1f2430 } .quiet { fill: #5b6472 } .line { stroke: #5b6472 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #161b22 } .ink { fill: #e6e9ef } .quiet { fill: #9aa4b2 } .line { stroke: #9aa4b2 }
}
"""
IN_PARTS = (Operation.SCATTER, Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL)
"""Operations in which each tensor is intended for one rank. The label is a letter followed by that rank's number."""


def label(data: Data, operation: Operation) -> str:
    """Returns the label of a box."""
    part = str(data.part) if operation in IN_PARTS else ""
    return "+".join(f"{LETTERS[rank]}{part}" for rank in sorted(data.ranks))


def held(state: State, rank: int, buffers: tuple[Buffer, ...]) -> list[Data]:
    """Returns the contents of the rank's first non-empty buffer."""
    for buffer in buffers:
        found = [state[cell] for cell in sorted(state) if cell[0] == rank and cell[1] == buffer]
        if found:
            return found
    return []


def width_of(text: str) -> float:
    """Returns the width of a box with this label."""
    return max(30, 8.4 * len(text) + 12)


def boxes(x: float, rank: int, row: list[Data], operation: Operation) -> tuple[list[str], float]:
    """Returns a row of boxes that begins at `x`, and the coordinate of its end."""
    shapes = []
    y = TOP + rank * ROW
    for data in row:
        text = label(data, operation)
        width = width_of(text)
        color = COLORS[min(data.ranks)] if len(data.ranks) == 1 else SUM
        shapes.append(f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{BOX}" rx="5" fill="{color}"/>')
        middle = 'fill="#ffffff" text-anchor="middle" font-size="13"'
        shapes.append(f'<text x="{x + width / 2:g}" y="{y + 20}" {middle}>{escape(text)}</text>')
        x += width + GAP
    return shapes, x


def draw(operation: Operation) -> str:
    """Returns the picture of an operation as SVG."""
    algorithm = "ring" if operation == Operation.ALL_TO_ALL else "tree"
    states = play(algorithm, operation, RANKS).states
    shapes: list[str] = []
    ends = [float(LEFT)]
    for rank in range(RANKS):
        name = f'<text x="20" y="{TOP + rank * ROW + 20}" font-size="13.5" class="ink">rank {rank}</text>'
        drawn, end = boxes(LEFT, rank, held(states[0], rank, (Buffer.INPUT, Buffer.OUTPUT)), operation)
        shapes += [name, *drawn]
        ends.append(end)
    middle = max(ends)
    after = middle + ARROW
    y = TOP + (RANKS * ROW - (ROW - BOX)) / 2
    tip = after - 16
    shapes.append(
        f'<path d="M{middle + 12:g},{y:g} H{tip:g} m-8,-6 l8,6 l-8,6" fill="none" class="line" stroke-width="2"/>'
    )
    ends = [after + 60]
    for rank in range(RANKS):
        row = held(
            states[-1], rank, (Buffer.OUTPUT, Buffer.INPUT) if operation == Operation.REDUCE else (Buffer.OUTPUT,)
        )
        drawn, end = boxes(after, rank, row, operation)
        shapes += drawn
        ends.append(end)
    heads = [
        f'<text x="{x:g}" y="{TOP - 14}" font-size="12.5" class="quiet">{word}</text>'
        for x, word in ((LEFT, "before"), (after, "after"))
    ]
    return svg(str(operation), [*heads, *shapes], max(ends) + 14)


def svg(title: str, shapes: list[str], width: float) -> str:
    """Returns the complete SVG document."""
    height = TOP + RANKS * ROW + 6
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{width:g}" height="{height}" rx="10" class="paper"/>',
            f'<text x="20" y="30" font-size="16" class="ink">{title}</text>',
            *shapes,
            "</svg>\n",
        ]
    )


PICTURES = {
    f"collective-{str(operation).replace('_', '-')}.svg": partial(draw, operation)
    for operation in Operation
    if operation != Operation.BARRIER
}


def main() -> None:
    """Writes the SVG files."""
    for name, picture in PICTURES.items():
        Path(__file__).with_name(name).write_text(picture())


if __name__ == "__main__":
    main()
