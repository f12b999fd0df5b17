"""Puts together what the nodes see of their workers, and has the diagnosis shown where the job was started.

It stands around the state machine that decides what the nodes do, and is one itself: without sockets or a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.launch.nodes.messages import End, Join, Look, Report, Sighting, Start, Told
from paceline.launch.nodes.steering import Orders, Steering
from paceline.observe.watching import Said

if TYPE_CHECKING:
    from paceline.observe.picture import Picture
    from paceline.observe.verdict import Verdict

PATIENCE_S = 4.0  # for the other nodes' pictures, which take as long as a look


@dataclass
class Sightings:
    """A steering that also answers sightings.

    Attributes:
        inner: decides everything else.
        word: what the numbers of the workers are.
    """

    inner: Steering
    word: str = "rank"
    _serves: dict[str, bool] = field(default_factory=dict)  # of each node, whether it serves the meeting
    _pictures: dict[str, Picture] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)
    _deadline_s: float | None = None  # when to make do with the pictures that have come
    _said: Said = field(default_factory=Said)
    _has_ended: bool = False

    @property
    def deadline_s(self) -> float | None:
        """When `tick` must be called if nothing else happens before; None for never."""
        known = [each for each in (self.inner.deadline_s, self._deadline_s) if each is not None]
        return min(known, default=None)

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Takes a node's report."""
        if isinstance(report, Sighting):
            return self._sighted(node, report, now_s)
        if isinstance(report, Join):
            self._serves[node] = report.serves
        return self._with_the_last_word(self.inner.reported(node, report, now_s))

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        """Removes a node whose launcher has ended."""
        self._forget(node)
        return self._with_the_last_word(self.inner.ended(node, why, now_s))

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        """Removes a node that was lost."""
        self._forget(node)
        return self._with_the_last_word(self.inner.lost(node, why, now_s, silent_s))

    def tick(self, now_s: float) -> Orders:
        """Does what is due at `now_s`."""
        orders = self._with_the_last_word(self.inner.tick(now_s))
        if self._deadline_s is not None and now_s >= self._deadline_s:
            orders = [*orders, *self._conclude(now_s)]
        return orders

    def _sighted(self, node: str, sighting: Sighting, now_s: float) -> Orders:
        if not sighting.body:
            text = self._said.resumed(now_s)
            return self._tell(text) if text is not None else []
        from paceline.observe.picture import decode

        try:
            picture = decode(sighting.body)
        except ValueError:
            return []
        self._pictures[node] = picture
        self._asked.discard(node)
        if sighting.is_last:
            return []
        others: Orders = []
        if picture.stalled_since_s is not None and self._deadline_s is None:
            self._asked = set(self._serves) - {node}
            self._pictures = {node: picture}
            self._deadline_s = now_s + PATIENCE_S
            others = [(other, Look()) for other in sorted(self._asked)]
        return [*others, *(self._conclude(now_s) if not self._asked else [])]

    def _conclude(self, now_s: float) -> Orders:
        """Says what the pictures show."""
        self._deadline_s = None
        self._asked.clear()
        stalls = [
            picture.taken_s - picture.stalled_since_s
            for picture in self._pictures.values()
            if picture.stalled_since_s is not None
        ]
        verdict = self._verdict()
        self._pictures.clear()
        if verdict is None or not stalls:
            return []
        text = self._said.tell(verdict, now_s - max(stalls))
        return self._tell(text, verdict.blamed) if text is not None else []

    def _verdict(self) -> Verdict | None:
        from paceline.observe.diagnosis import diagnose
        from paceline.observe.picture import scene_of

        return diagnose(scene_of(self._pictures.values(), self.word))

    def _tell(self, text: str, blamed: tuple[int, ...] | None = None) -> Orders:
        told = Told(text, is_stall=blamed is not None, blamed=blamed or ())
        serving = [node for node, serves in self._serves.items() if serves]
        return [(node, told) for node in serving or self._serves]  # who served first may be gone

    def _with_the_last_word(self, orders: Orders) -> Orders:
        """Adds, in front of the orders that end a job, why it has failed, or which ranks the others waited for."""
        if any(isinstance(order, Start) for _, order in orders):
            self._pictures.clear()
            self._said = Said()
        ends = [(node, order) for node, order in orders if isinstance(order, End)]
        if self._has_ended or not ends:
            return orders
        self._has_ended = True
        texts = []
        if self._pictures and ends[0][1].failures:
            verdict = self._verdict()
            texts = [verdict.sentence] if verdict is not None and verdict.is_fault else []
        elif self._pictures and ends[0][1].code == 0:
            texts = self._late()
        told = [(node, Told(text, is_last=True)) for text in texts for node, _ in ends]
        return [*told, *orders]

    def _late(self) -> list[str]:
        """Returns what to say of ranks that the others waited for as a rule."""
        from paceline.observe.alignment import aligned
        from paceline.observe.picture import scene_of
        from paceline.observe.stragglers import worth_telling
        from paceline.observe.transfers import slow_network

        seen = scene_of(self._pictures.values()).ranks
        ranks = aligned(seen, [rank.host for rank in seen])
        return [each.sentence for each in (*worth_telling(ranks, self.word), *slow_network(ranks))]

    def _forget(self, node: str) -> None:
        self._serves.pop(node, None)
        self._asked.discard(node)
