"""What a launcher without the live page sees of its ranks for the one that has it, while somebody looks at the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import msgspec

from paceline.launch.local_notes import LocalNotes
from paceline.launch.nodes.messages import Seen
from paceline.observe.live.lookout import Lookout
from paceline.observe.live.notes import Elsewhere
from paceline.observe.live.sample import Bucket, Event, Facts, Line, RankSample, RankStep, Sample, Stack
from paceline.observe.watching import Watched
from paceline.security.received import decoded

_EVERY_S = 1.0
_MOST_LINES = 500  # that are sent at once
_MOST_CHARACTERS = 1 << 18

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Elsewhere).decode


class Outlook:
    """Looks at the workers of this machine each second until `close`.

    Args:
        local: what this launcher has noted.
        workers: returns those that run.
        offset_s: returns what is to be added to this machine's clock to get that of the page's.
        send: is called with what is seen.
    """

    def __init__(
        self,
        local: LocalNotes,
        workers: Callable[[], Iterable[Watched]],
        offset_s: Callable[[], float],
        send: Callable[[Seen], None],
    ) -> None:
        self._local = local
        self._workers = workers
        self._offset_s = offset_s
        self._send = send
        self._lookout = Lookout(local.notes, Facts(""))
        self.deadline_s = 0.0
        local.hear(True)

    def tick(self, now_s: float) -> None:
        """Looks and sends what it sees, if that is due."""
        if now_s >= self.deadline_s:
            self.deadline_s = now_s + _EVERY_S
            self.look()

    def look(self) -> None:
        """Looks and sends what it sees."""
        self._local.watch(self._workers())
        sample = self._lookout.look()
        if sample.ranks or sample.lines or sample.events:
            self._send(Seen(encode(sample, self._offset_s())))

    def close(self) -> None:
        """Releases the recordings; idempotent."""
        self._local.hear(False)
        self._local.forget_workers()
        self._lookout.close()


def encode(sample: Sample, offset_s: float) -> str:
    """Returns a sample as JSON, with its times on the page's clock, in about 2 KB a rank and second.

    Only the last step of a rank keeps its phases and buckets, since the page shows one step of them. Where there is
    much output, the latest is sent.
    """
    told = Elsewhere(
        ranks=tuple(_rank(each, offset_s) for each in sample.ranks),
        links=sample.links,
        events=tuple(_at(each, offset_s) for each in sample.events),
        lines=tuple(_at(each, offset_s) for each in _latest(sample.lines)),
        stacks=tuple(_at(each, offset_s) for each in sample.stacks),
    )
    return _encode(told).decode()


def decode(body: str) -> Elsewhere:
    """Returns what another machine has seen.

    Raises:
        ValueError: `body` is something else.
    """
    return decoded(_decode, body)


def _latest(lines: tuple[Line, ...]) -> tuple[Line, ...]:
    kept: list[Line] = []
    characters = 0
    for line in reversed(lines[-_MOST_LINES:]):
        characters += len(line.text)
        if characters > _MOST_CHARACTERS:
            break
        kept.append(line)
    left_out = len(lines) - len(kept)
    if left_out:
        first = lines[0]
        kept.append(Line(first.at_s, first.rank, 2, f"({left_out} lines of this machine's ranks are left out here)"))
    return tuple(reversed(kept))


_Moment = TypeVar("_Moment", Event, Line, Stack)


def _at(moment: _Moment, offset_s: float) -> _Moment:
    return replace(moment, at_s=moment.at_s + offset_s)


def _rank(sample: RankSample, offset_s: float) -> RankSample:
    last = len(sample.steps) - 1
    steps = tuple(_step(each, offset_s, at == last) for at, each in enumerate(sample.steps))
    return replace(sample, heard_s=sample.heard_s + offset_s, steps=steps)


def _step(step: RankStep, offset_s: float, is_last: bool) -> RankStep:
    def at(time_s: float) -> float:
        return round(time_s + offset_s, 6)

    phases = tuple((name, at(begin), at(end)) for name, begin, end in step.phases) if is_last else ()
    buckets = tuple(Bucket(at(b.ready_s), at(b.sent_s), at(b.done_s), b.nbytes, b.name) for b in step.buckets)
    times = {name: round(value, 6) for name, value in vars(step).items() if name.endswith("_s") and value is not None}
    times |= {"begin_s": at(step.begin_s), "end_s": at(step.end_s)}
    return replace(step, **times, phases=phases, buckets=buckets if is_last else ())
