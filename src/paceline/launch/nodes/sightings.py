"""Puts together what the nodes see of their workers, and has the diagnosis shown where the job was started.

It stands around the state machine that decides what the nodes do, and is one itself: without sockets or a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.launch.nodes.around import Around
from paceline.launch.nodes.messages import End, Look, Report, Sighting, Start, Told
from paceline.launch.nodes.steering import Orders
from paceline.observe.carefully import carefully
from paceline.observe.watching import Said

if TYPE_CHECKING:
    from paceline.observe.picture import Picture
    from paceline.observe.verdict import Verdict

PATIENCE_S = 4.0  # for the other nodes' pictures, which take as long as a look
FAILURE_PATIENCE_S = 0.3  # likewise when a worker has failed, for pictures that are taken at once


@dataclass
class Round:
    """Pictures that are being collected.

    Attributes:
        missing: the nodes whose pictures have not come.
        deadline_s: when to make do with those that have.
        pictures: by node.
    """

    missing: set[str]
    deadline_s: float
    pictures: dict[str, Picture] = field(default_factory=dict)

    def add(self, node: str, picture: Picture) -> None:
        """Takes a node's picture, asked for or not."""
        self.pictures[node] = picture
        self.missing.discard(node)

    def is_over(self, now_s: float) -> bool:
        """Returns whether nothing is waited for any longer."""
        return not self.missing or now_s >= self.deadline_s


@dataclass
class Sightings(Around):
    """A steering that also answers sightings; `inner` decides everything else.

    Attributes:
        word: what the numbers of the workers are.
    """

    word: str = "rank"
    _stall: Round | None = None
    _failure: Round | None = None  # one in each generation
    _last: dict[str, Picture] = field(default_factory=dict)  # of workers that have ended
    _said: Said = field(default_factory=Said)
    _has_failed: bool = False  # a worker of this generation
    _has_ended: bool = False

    @property
    def deadline_s(self) -> float | None:
        """When `tick` must be called if nothing else happens before; None for never."""
        rounds = [each.deadline_s for each in (self._stall, self._failure) if each is not None]
        own_s = min(rounds, default=None)
        known = [each for each in (self.inner.deadline_s, own_s) if each is not None]
        return min(known, default=None)

    def reported(self, node: str, report: Report, now_s: float) -> Orders:
        """Takes a node's report."""
        if isinstance(report, Sighting):
            return self._sighted(node, report, now_s)
        return self._with_the_last_word(super().reported(node, report, now_s))

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        """Removes a node whose launcher has ended."""
        return self._with_the_last_word(super().ended(node, why, now_s))

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        """Removes a node that was lost."""
        return self._with_the_last_word(super().lost(node, why, now_s, silent_s))

    def tick(self, now_s: float) -> Orders:
        """Does what is due at `now_s`."""
        return [*self._with_the_last_word(super().tick(now_s)), *self._conclude(now_s)]

    def _sighted(self, node: str, sighting: Sighting, now_s: float) -> Orders:
        if not sighting.body:
            text = self._said.resumed(now_s)
            return self._tell(text) if text is not None else []
        from paceline.observe.picture import decode

        try:
            picture = decode(sighting.body)
        except ValueError:
            return []
        orders: Orders = []
        if sighting.is_last:
            self._last[node] = picture
            if self._failure is not None:
                self._failure.add(node, picture)
        elif sighting.is_failure:
            if not self._has_failed:
                self._has_failed = True
                self._failure, orders = self._round(node, now_s + FAILURE_PATIENCE_S, Look(is_failure=True))
                for other, last in self._last.items():
                    self._failure.add(other, last)
            if self._failure is not None:
                self._failure.add(node, picture)
        else:
            if self._stall is None and picture.stalled_since_s is not None:
                self._stall, orders = self._round(node, now_s + PATIENCE_S, Look())
            if self._stall is not None:
                self._stall.add(node, picture)
        return [*orders, *self._conclude(now_s)]

    def _round(self, node: str, deadline_s: float, order: Look) -> tuple[Round, Orders]:
        """Returns a round that a node's picture has begun, and the orders to all others."""
        others = set(self._serves) - {node}
        return Round(others, deadline_s), [(other, order) for other in sorted(others)]

    def _conclude(self, now_s: float) -> Orders:
        """Says what the pictures of a round show that is over."""
        if self._failure is not None and self._failure.is_over(now_s):
            finished, self._failure = self._failure, None
            verdict = self._verdict(finished.pictures)
            if verdict is None or not (verdict.is_failure or (verdict.is_fault and not finished.missing)):
                return []  # what is missing may be the cause
            return self._tell_verdict(verdict, now_s)
        if self._stall is None or not self._stall.is_over(now_s):
            return []
        pictures, self._stall = self._stall.pictures, None
        stalls = [
            picture.taken_s - picture.stalled_since_s
            for picture in pictures.values()
            if picture.stalled_since_s is not None
        ]
        verdict = self._verdict(pictures)
        return [] if verdict is None or not stalls else self._tell_verdict(verdict, now_s - max(stalls))

    def _tell_verdict(self, verdict: Verdict, since_s: float) -> Orders:
        """Says it, unless that was said before."""
        text = self._said.tell(verdict, since_s)
        return self._tell(text, verdict.blamed) if text is not None else []

    def _verdict(self, pictures: Mapping[str, Picture]) -> Verdict | None:
        from paceline.observe.diagnosis import diagnose
        from paceline.observe.picture import scene_of

        return carefully(lambda: diagnose(scene_of(pictures.values(), self.word)), None)

    def _tell(self, text: str, blamed: tuple[int, ...] | None = None) -> Orders:
        told = Told(text, is_stall=blamed is not None, blamed=blamed or ())
        return [(node, told) for node in self._serving() or self._serves]  # who served first may be gone

    def _with_the_last_word(self, orders: Orders) -> Orders:
        """Adds, in front of the orders that end a job, why it has failed, or which ranks the others waited for."""
        if any(isinstance(order, Start) for _, order in orders):
            self._stall = self._failure = None
            self._has_failed = False
            self._last.clear()
            self._said = Said()
        ends = [(node, order) for node, order in orders if isinstance(order, End)]
        if self._has_ended or not ends:
            return orders
        self._has_ended = True
        texts = []
        if self._last and ends[0][1].failures:
            verdict = self._verdict(self._last)
            texts = [verdict.sentence] if verdict is not None and verdict.is_fault else []
        elif self._last and ends[0][1].code == 0:
            from paceline.observe.lateness import lateness

            texts = carefully(lambda: lateness(self._last.values(), self.word), [])
        told = [(node, Told(text, is_last=True)) for text in texts for node, _ in ends]
        return [*told, *orders]

    def _forget(self, node: str) -> None:
        super()._forget(node)
        for each in (self._stall, self._failure):
            if each is not None:
                each.missing.discard(node)
