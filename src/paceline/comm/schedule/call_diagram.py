"""SVG diagram of the messages in a simulated call over time (`draw_call`)."""

from __future__ import annotations

from xml.sax.saxutils import escape

from paceline.comm.schedule.algorithms import build, format_seconds
from paceline.comm.schedule.network import Network
from paceline.comm.schedule.simulation import CallTiming, SimulatedMessage, find_path, simulate_schedules
from paceline.comm.schedule.steps import ROOTED, Operation, Schedule

MOST_RANKS, MOST_MESSAGES = 64, 5_000
"""The maximum number of ranks, and of messages, in a readable picture."""

COLORS = ("#0369a1", "#15803d", "#a16207", "#6d28d9", "#b91c1c", "#0e7490", "#be185d", "#4d7c0f")
LEFT, RIGHT, TOP, WIDTH, ROW = 110, 24, 70, 960, 44
PLAYS_S = 8
STYLE = """
.paper { fill: #ffffff } .ink { fill: #1f2430 } .quiet { fill: #5b6472 } .line { stroke: #c3c9d4 }
.now { stroke: #1f2430 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #161b22 } .ink { fill: #e6e9ef } .quiet { fill: #9aa4b2 } .line { stroke: #3a4350 }
  .now { stroke: #e6e9ef }
}
"""


def draw_call(algorithm: str, operation: Operation, nbytes: int, network: Network, root: int = 0) -> str:
    """Returns an SVG of a call: ranks from top to bottom, time from left to right, and a band for each message.

    A band begins on the sender's line, where it spans the interval in which the bytes are sent. It ends on the
    receiver's line, where it spans the interval in which they arrive. The color of a band depends on the message's
    first block.

    Raises:
        ValueError: the algorithm does not implement the operation, or there are too many ranks or messages for a
            picture.
    """
    n = network.world_size
    if n > MOST_RANKS:
        raise ValueError(f"a diagram of {n} ranks would not be legible: draw at most {MOST_RANKS}")
    rooted = root if operation in ROOTED else -1
    schedules = [build(algorithm, operation, rank, n, rooted, network.hosts) for rank in range(n)]
    timing = simulate_schedules(schedules, network, nbytes, record=True)
    if len(timing.transfers) > MOST_MESSAGES:
        raise ValueError(
            f"{algorithm} {operation} of {n} ranks has {len(timing.transfers):,} messages, and a diagram of more than "
            f"{MOST_MESSAGES:,} would not be legible: draw fewer ranks"
        )
    takes = format_seconds(timing.seconds)
    return _CallDiagram(schedules, timing, network).svg(
        f"{algorithm} {operation} of {nbytes:,} bytes on {n} ranks: {takes}"
    )


class _CallDiagram:
    def __init__(self, schedules: list[Schedule], timing: CallTiming, network: Network) -> None:
        self.schedules = schedules
        self.timing = timing
        self.network = network
        self.order = [rank for host in network.hosts for rank in host]
        self.height = TOP + ROW * len(self.order) + 40
        self.lasts_s = max(timing.ends) or 1.0

    def svg(self, title: str) -> str:
        size = f'width="{WIDTH}" height="{self.height}" viewBox="0 0 {WIDTH} {self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
                f"<title>{escape(title)}</title><style>{STYLE}</style>",
                f'<rect class="paper" width="{WIDTH}" height="{self.height}"/>',
                f'<text class="ink" x="20" y="28" font-size="16" font-weight="bold">{escape(title)}</text>',
                *self._rows(),
                *self._scale(),
                *map(self._message, self.timing.transfers),
                self._now(),
                "</svg>\n",
            ]
        )

    def _x(self, at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at_s / self.lasts_s

    def _y(self, rank: int) -> float:
        return TOP + ROW * (self.order.index(rank) + 0.5)

    def _rows(self) -> list[str]:
        found = []
        for number, host in enumerate(self.network.hosts):
            for rank in host:
                y = self._y(rank)
                end = self._x(self.timing.ends[rank])
                found.append(f'<line class="line" x1="{LEFT}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
                name = f"rank {rank}" if len(self.network.hosts) == 1 else f"host {number}, rank {rank}"
                found.append(f'<text class="ink" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
        return found

    def _scale(self) -> list[str]:
        y = self.height - 16
        return [
            f'<text class="quiet" x="{self._x(part * self.lasts_s):.1f}" y="{y}" text-anchor="middle">'
            f"{format_seconds(part * self.lasts_s) if part else '0'}</text>"
            for part in (0, 0.25, 0.5, 0.75, 1)
        ]

    def _message(self, message: SimulatedMessage) -> str:
        source, target, begin_s, end_s = message.source, message.target, message.begin_s, message.end_s
        latency_s = min(find_path(self.network, source, target).latency_s, end_s - begin_s)
        corners = [(begin_s, source), (end_s - latency_s, source), (end_s, target), (begin_s + latency_s, target)]
        points = " ".join(f"{self._x(time_s):.1f},{self._y(rank):.1f}" for time_s, rank in corners)
        src = self.schedules[source].steps[message.step].src
        first, length = (src.first, src.length) if src is not None else (0, 0)
        color = COLORS[first % len(COLORS)]
        times = f"{format_seconds(begin_s)} to {format_seconds(end_s)}"
        what = f"block {first}" if length == 1 else f"blocks {first} to {first + length - 1}" if length else "nothing"
        title = f"rank {source} to rank {target}: {what}, {message.nbytes:,.0f} bytes, {times}"
        look = f'fill="{color}" fill-opacity="0.35" stroke="{color}" stroke-opacity="0.8"'
        return f'<polygon points="{points}" {look}><title>{title}</title></polygon>'

    def _now(self) -> str:
        """Returns an animated line that repeatedly moves from left to right."""
        moves = "".join(
            f'<animate attributeName="{end}" from="{LEFT}" to="{WIDTH - RIGHT}" dur="{PLAYS_S}s" '
            'repeatCount="indefinite"/>'
            for end in ("x1", "x2")
        )
        bottom = self.height - 36
        return f'<line class="now" x1="{LEFT}" x2="{LEFT}" y1="{TOP}" y2="{bottom}" stroke-width="1.5">{moves}</line>'
