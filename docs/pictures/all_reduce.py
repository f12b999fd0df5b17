"""Draws the ring and tree all-reduce as animations of Paceline's schedules, round by round.

python docs/pictures/all_reduce.py        writes the SVG files next to this script
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

from playing import Data, Message, play

from paceline.comm.schedule.steps import Buffer, Operation

LETTERS = "ABCDEFGH"
COLORS = ("#0369a1", "#0e7490", "#a16207", "#15803d")
"""Colors of blocks that contain the data of one rank, of at most half of the ranks, of more than half, and of all."""

LEFT, TOP, COLUMN, ROW, WIDTH, HEIGHT = 84, 104, 104, 52, 84, 32
MOVES_S, RESTS_S, ENDS_S = 1.4, 0.6, 3.0
STYLE = """
.paper { fill: #ffffff } .ink { fill: #1f2430 } .quiet { fill: #5b6472 } .slot { fill: none; stroke: #c3c9d4 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #161b22 } .ink { fill: #e6e9ef } .quiet { fill: #9aa4b2 } .slot { stroke: #3a4350 }
}
"""


@dataclass(frozen=True)
class Clock:
    """Converts rounds to times in an animation that repeats after the last round. Times are fractions of its length."""

    rounds: int

    @property
    def lasts_s(self) -> float:
        return self.rounds * (MOVES_S + RESTS_S) + ENDS_S

    def begins(self, at: int) -> float:
        """Returns the time at which a round begins; 1 for a round after the last one."""
        return 1.0 if at > self.rounds else (at * (MOVES_S + RESTS_S) + RESTS_S) / self.lasts_s

    def arrives(self, at: int) -> float:
        """Returns the time at which the messages of a round have arrived."""
        return self.begins(at) + MOVES_S / self.lasts_s

    def shown(self, begin: float, end: float) -> str:
        """Returns the animation element that shows its parent only between `begin` and `end`."""
        times, values = [0.0], ["1" if begin <= 0 else "0"]
        if begin > 0:
            times, values = [*times, begin], [*values, "1"]
        if end < 1:
            times, values = [*times, end], [*values, "0"]
        spelled = ";".join(f"{time:.4f}".rstrip("0").rstrip(".") for time in times)
        return (
            f'<animate attributeName="opacity" calcMode="discrete" values="{";".join(values)}" keyTimes="{spelled}" '
            f'dur="{self.lasts_s:g}s" repeatCount="indefinite"/>'
        )

    def moves(self, at: int, path: str) -> str:
        """Returns the animation element that moves its parent along a path during a round."""
        return (
            f'<animateMotion path="{path}" calcMode="linear" keyPoints="0;0;1;1" '
            f'keyTimes="0;{self.begins(at):.4f};{self.arrives(at):.4f};1" dur="{self.lasts_s:g}s" '
            'repeatCount="indefinite"/>'
        )


def corner(rank: int, block: int) -> tuple[float, float]:
    """Returns the coordinates of the upper left corner of a rank's block."""
    return LEFT + rank * COLUMN, TOP + block * ROW


def box(data: Data, n: int) -> str:
    """Returns a box at the origin, labeled with the ranks whose data it contains."""
    some = len(data.ranks)
    color = COLORS[3 if some == n else 2 if 2 * some > n else 1 if some > 1 else 0]
    text = "".join(LETTERS[rank] for rank in sorted(data.ranks))
    return (
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{color}" stroke="#ffffff"/>'
        f'<text x="{WIDTH / 2:g}" y="21" text-anchor="middle" font-size="13" fill="#ffffff">{text}</text>'
    )


def resting(states: list[dict], clock: Clock, n: int, blocks: int) -> list[str]:
    """Returns the stationary boxes; each is shown while its contents are unchanged."""
    shapes = []
    for rank in range(n):
        for block in range(blocks):
            values = [state[rank, Buffer.OUTPUT, block] for state in states]
            x, y = corner(rank, block)
            since = 0
            for at in range(1, len(values) + 1):
                if at < len(values) and values[at] == values[since]:
                    continue
                begin = clock.arrives(since - 1) if since else 0.0
                end = clock.arrives(at - 1) if at < len(values) else 1.0
                hidden = ' opacity="0"' if since else ""
                content = box(values[since], n) + clock.shown(begin, end)
                shapes.append(f'<g transform="translate({x:g} {y:g})"{hidden}>{content}</g>')
                since = at
    return shapes


def moving(message: Message, at: int, clock: Clock, n: int) -> list[str]:
    """Returns the moving boxes of a message; they pass above the ranks between the sender and the receiver."""
    shapes = []
    for block, into, data in zip(message.blocks, message.into, message.data, strict=True):
        x, y = corner(message.source, block)
        to_x, to_y = corner(message.target, into)
        lift = y - 12 - 10 * abs(message.target - message.source)
        path = f"M{x:g},{y:g} Q{(x + to_x) / 2:g},{lift:g} {to_x:g},{to_y:g}"
        seen = clock.shown(clock.begins(at), clock.arrives(at))
        shapes.append(f'<g opacity="0">{box(data, n)}{clock.moves(at, path)}{seen}</g>')
    return shapes


def captions(rounds: list[list[Message]], clock: Clock) -> list[str]:
    """Returns a caption for each round."""
    shapes = []
    for at, messages in enumerate(rounds):
        what = "received blocks are added" if messages[0].adds else "received blocks replace the old ones"
        begin = clock.arrives(at - 1) if at else 0.0
        words = f"round {at + 1} of {len(rounds)}: {what}"
        hidden = ' opacity="0"' if at else ""
        end = clock.arrives(at)
        shapes.append(
            f'<g{hidden}><text x="20" y="56" font-size="14" class="quiet">{words}</text>{clock.shown(begin, end)}</g>'
        )
    done = "every rank has the sum"
    last = clock.shown(clock.arrives(len(rounds) - 1), 1.0)
    shapes.append(f'<g opacity="0"><text x="20" y="56" font-size="14" class="quiet">{done}</text>{last}</g>')
    return shapes


def draw(algorithm: str, n: int, title: str) -> str:
    """Returns the animation of an all-reduce among `n` ranks as SVG."""
    played = play(algorithm, Operation.ALL_REDUCE, n)
    blocks = 1 + max(block for _, buffer, block in played.states[0] if buffer == Buffer.OUTPUT)
    clock = Clock(len(played.rounds))
    width, height = LEFT + n * COLUMN + 10, TOP + blocks * ROW + 6
    shapes = [f'<text x="20" y="30" font-size="16" class="ink">{escape(title)}</text>']
    for rank in range(n):
        middle = corner(rank, 0)[0] + WIDTH / 2
        look = 'text-anchor="middle" font-size="13" class="ink"'
        shapes.append(f'<text x="{middle:g}" y="{TOP - 14}" {look}>rank {rank}</text>')
        for block in range(blocks):
            x, y = corner(rank, block)
            shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" class="slot"/>')
    for block in range(blocks if blocks > 1 else 0):
        y = TOP + block * ROW + 21
        shapes.append(f'<text x="20" y="{y}" font-size="13" class="quiet">block {block}</text>')
    shapes += captions(played.rounds, clock)
    shapes += resting(played.states, clock, n, blocks)
    shapes += [
        shape for at, messages in enumerate(played.rounds) for each in messages for shape in moving(each, at, clock, n)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="10" class="paper"/>',
            *shapes,
            "</svg>\n",
        ]
    )


PICTURES = {
    "all-reduce-ring.svg": partial(draw, "ring", 4, "Ring all-reduce: A to D are the ranks' own blocks, AB is A + B"),
    "all-reduce-tree.svg": partial(draw, "tree", 8, "Tree all-reduce: A to H are the ranks' tensors, AB is A + B"),
}


def main() -> None:
    """Writes the SVG files."""
    for name, picture in PICTURES.items():
        Path(__file__).with_name(name).write_text(picture())


if __name__ == "__main__":
    main()
