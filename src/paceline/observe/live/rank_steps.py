"""Turns what a rank recorded into its training steps: how long each part took, and what was exposed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.observe.live.sample import Bucket, RankStep
from paceline.record.names import EventKind

Interval = tuple[float, float]

SAMPLES = "samples"
"""The name under which a program logs how many samples a rank trains on in a step."""

_PHASES = {
    int(EventKind.DATA_WAIT): "data",
    int(EventKind.FORWARD): "forward",
    int(EventKind.BACKWARD): "backward",
    int(EventKind.OPTIMIZER): "optimizer",
}


class PastCall(NamedTuple):
    """A call that is over: when it began, when all ranks had come (0 if that is not known), and when it ended.

    `predicted_s` is how long the engine expected it to take, 0 if it did not say.
    """

    begin_s: float
    complete_s: float
    end_s: float
    is_async: bool
    predicted_s: float = 0.0


@dataclass
class Pieces:
    """What was recorded of one step so far, in seconds."""

    phases: dict[str, list[Interval]] = field(default_factory=dict)
    buckets: list[Bucket] = field(default_factory=list)
    calls: list[PastCall] = field(default_factory=list)
    samples: float = 0.0

    def add(self, kind: int, start_s: float, end_s: float) -> None:
        """Adds a phase, if the event is one."""
        name = _PHASES.get(kind)
        if name is not None:
            self.phases.setdefault(name, []).append((start_s, end_s))

    def step(self, number: int, begin_s: float, end_s: float) -> RankStep:
        """Returns the step, which lasted from `begin_s` to `end_s`."""
        buckets = sorted(map(self._met, self.buckets), key=lambda bucket: bucket.ready_s)
        spans = [
            *((each.sent_s, each.done_s) for each in buckets),
            *((each.begin_s, each.end_s) for each in self.calls),
        ]
        traffic = joined(spans)
        exposed = self._exposed(buckets, begin_s, end_s)
        own = {name: without(joined(spans), exposed) for name, spans in self.phases.items()}
        phases = [(name, *span) for name, spans in own.items() for span in spans]
        phases += [("exposed", *span) for span in exposed]
        return RankStep(
            step=number,
            begin_s=begin_s,
            end_s=end_s,
            data_s=length(own.get("data", ())),
            forward_s=length(own.get("forward", ())),
            backward_s=length(own.get("backward", ())),
            exposed_s=length(exposed),
            optimizer_s=length(own.get("optimizer", ())),
            communication_s=length(within(traffic, begin_s, end_s)),
            samples=self.samples,
            phases=tuple(sorted(phases, key=lambda phase: phase[1])),
            buckets=tuple(buckets),
            predicted_s=self._predicted(end_s - begin_s - length(exposed)),
        )

    def _predicted(self, own_s: float) -> float | None:
        """Returns what the step would have lasted if its calls had taken what was predicted.

        `own_s` is the rank's part of it, without waits.

        Buckets are averaged one after another, each when it is ready, as in `plan/stepping.py`. A call that nothing
        predicted counts as it was, unless a bucket waits for it.
        """
        if not any(each.predicted_s for each in self.calls):
            return None
        buckets, left = sorted(self.buckets, key=lambda each: each.ready_s), sorted(self.calls)
        end_s = min((each.sent_s for each in buckets), default=0.0)
        for bucket in buckets:
            call = next((each for each in left if bucket.ready_s <= each.begin_s and each.end_s <= bucket.done_s), None)
            if call is None or not call.predicted_s:
                return None
            left.remove(call)
            end_s = max(end_s, bucket.ready_s) + call.predicted_s
        exposed_s = max(0.0, end_s - buckets[-1].ready_s) if buckets else 0.0
        waited = (each.predicted_s or each.end_s - each.begin_s for each in left if not each.is_async)
        return own_s + exposed_s + sum(waited)

    def _met(self, bucket: Bucket) -> Bucket:
        """Returns the bucket with the time at which all ranks had come to its call, where it is known."""
        for call in self.calls:
            if call.complete_s and bucket.ready_s <= call.complete_s and call.end_s <= bucket.done_s:
                return replace(bucket, sent_s=max(bucket.sent_s, call.complete_s))
        return bucket

    def _exposed(self, buckets: Sequence[Bucket], begin_s: float, end_s: float) -> list[Interval]:
        """Returns when the rank did nothing but wait for communication.

        Those are its synchronous calls, and what is left of the buckets after the last gradient was there: until then
        backward computes.
        """
        waits = [(each.begin_s, each.end_s) for each in self.calls if not each.is_async]
        if buckets:
            last_ready_s = buckets[-1].ready_s
            waits += [(max(each.ready_s, last_ready_s), each.done_s) for each in buckets if each.done_s > last_ready_s]
        return within(joined(waits), begin_s, end_s)


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of intervals as disjoint ones in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            if end > union[-1][1]:
                union[-1] = (union[-1][0], end)
        elif end > start:
            union.append((start, end))
    return union


def within(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """Returns the parts of disjoint intervals between `begin` and `end`."""
    return [(max(start, begin), min(until, end)) for start, until in intervals if until > begin and start < end]


def without(intervals: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Returns disjoint intervals without the parts that lie in `holes`, which are disjoint and in order too."""
    rest: list[Interval] = []
    for start, end in intervals:
        at = start
        for begin, until in holes:
            if until <= at:
                continue
            if begin >= end:
                break
            if begin > at:
                rest.append((at, begin))
            at = until
        if at < end:
            rest.append((at, end))
    return rest


def length(intervals: Iterable[Interval]) -> float:
    """Returns the length of disjoint intervals together."""
    return sum(end - start for start, end in intervals)
