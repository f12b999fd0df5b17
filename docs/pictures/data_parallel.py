"""Draws how data-parallel replicas are kept synchronized, and how DataParallel differs.

python docs/pictures/data_parallel.py        writes the SVG files next to this script
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

COLUMN, ROW, LEFT, TOP = 190, 74, 130, 84
BOX_WIDTH, BOX_HEIGHT = 150, 44
INK, QUIET, PAPER = "#1f2430", "#6b7280", "#ffffff"
SAME, SHARED = "#d5e8d4", "#fff2cc"  # equal on all ranks; exchanged
OWN = ("#dae8fc", "#f8cecc", "#e1d5e7")  # specific to a rank or device
NEUTRAL = "#f3f4f6"


@dataclass
class Picture:
    """Boxes in columns and rows, with arrows between them."""

    title: str
    columns: list[str]
    rows: list[str]
    shapes: list[str] = field(default_factory=list)

    def box(self, column: int, row: int, text: str, fill: str, span: int = 1) -> None:
        """Draws a box with one or two lines of text that extends over `span` columns."""
        x, y = self._corner(column, row)
        width = BOX_WIDTH + (span - 1) * COLUMN
        self.shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{BOX_HEIGHT}" rx="6" fill="{fill}" stroke="{INK}"/>'
        )
        lines = text.split("\n")
        for at, line in enumerate(lines):
            middle = y + BOX_HEIGHT / 2 + 4.5 + 16 * (at - (len(lines) - 1) / 2)
            self.text(x + width / 2, middle, line, size=13, anchor="middle")

    def arrow(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        """Draws an arrow from the bottom of one box to the top of another; boxes are given as (column, row)."""
        (x, y), (to_x, to_y) = self._corner(*start), self._corner(*end)
        x, to_x = x + BOX_WIDTH / 2, to_x + BOX_WIDTH / 2
        self.shapes.append(
            f'<line x1="{x}" y1="{y + BOX_HEIGHT}" x2="{to_x}" y2="{to_y - 2}" stroke="{INK}" stroke-width="1.4" '
            'marker-end="url(#head)"/>'
        )

    def text(self, x: float, y: float, text: str, size: int, anchor: str = "start", color: str = INK) -> None:
        """Draws a line of text."""
        self.shapes.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
        )

    def svg(self) -> str:
        """Returns the picture as SVG."""
        width = LEFT + len(self.columns) * COLUMN
        height = TOP + len(self.rows) * ROW
        whole = Picture(self.title, self.columns, self.rows)
        whole.text(20, 30, self.title, size=15)
        for at, name in enumerate(self.columns):
            whole.text(LEFT + at * COLUMN + BOX_WIDTH / 2, 64, name, 14, "middle", QUIET)
        for at, name in enumerate(self.rows):
            whole.text(20, TOP + at * ROW + BOX_HEIGHT / 2 + 5, name, 13, color=QUIET)
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img">',
                f"<title>{escape(self.title)}</title>",
                head,
                f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
                *whole.shapes,
                *self.shapes,
                "</svg>\n",
            ]
        )

    @staticmethod
    def _corner(column: int, row: int) -> tuple[float, float]:
        return LEFT + column * COLUMN, TOP + row * ROW


def replicas_in_step() -> Picture:
    """Returns the picture of DistributedDataParallel: one process per replica, which only exchange gradients."""
    ranks = range(3)
    picture = Picture(
        "DistributedDataParallel: the same parameters, averaged gradients, the same step",
        [f"rank {rank} (a process)" for rank in ranks],
        ["parameters", "batch", "forward", "backward", "all-reduce", "step", "parameters"],
    )
    for rank in ranks:
        picture.box(rank, 0, "θ", SAME)
        picture.box(rank, 1, f"its own samples\n{rank}, {rank + 3}, {rank + 6}, …", OWN[rank])
        picture.box(rank, 2, f"loss {rank}", OWN[rank])
        picture.box(rank, 3, f"gradient {rank}", OWN[rank])
        picture.box(rank, 5, "the same step\nfrom the average", SAME)
        picture.box(rank, 6, "θ′, bitwise equal", SAME)
        for row in (0, 1, 2, 3, 4, 5):
            picture.arrow((rank, row), (rank, row + 1))
    picture.box(0, 4, "average of gradients 0, 1 and 2, in place; bitwise equal on all ranks", SHARED, span=3)
    return picture


def one_process() -> Picture:
    """Returns the picture of DataParallel: in each step, one process copies the module to every device."""
    devices = range(3)
    picture = Picture(
        "DataParallel: one process; other devices hold copies for one step",
        [f"device {device} (a thread)" for device in devices],
        ["parameters", "scatter", "replicate", "forward", "gather, loss", "backward", "step"],
    )
    picture.box(0, 0, "θ", SAME)
    picture.box(0, 1, "the batch is split into one part for each device", SHARED, span=3)
    picture.box(0, 6, "step, only here: θ′", SAME)
    picture.box(0, 4, "outputs concatenated", SHARED)
    picture.arrow((0, 0), (0, 1))
    for device in devices:
        picture.box(device, 2, "θ itself" if device == 0 else "a copy of θ,\ncreated in each step", SAME)
        picture.box(device, 3, f"output {device}", OWN[device])
        picture.box(device, 5, f"gradient {device}", OWN[device])
        picture.arrow((device, 1), (device, 2))
        picture.arrow((device, 2), (device, 3))
        picture.arrow((device, 3), (0, 4))
        picture.arrow((0, 4), (device, 5))
        picture.arrow((device, 5), (0, 6))
    picture.text(
        LEFT + COLUMN, TOP + 6 * ROW + 20, "gradients accumulate in θ on device 0; the copies,", 13, color=QUIET
    )
    picture.text(
        LEFT + COLUMN, TOP + 6 * ROW + 37, "and Python threads that run one at a time, slow it down", 13, color=QUIET
    )
    return picture


PICTURES = {"replicas-in-step.svg": replicas_in_step, "data-parallel-one-process.svg": one_process}


def main() -> None:
    """Writes the SVG files."""
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw().svg())


if __name__ == "__main__":
    main()
