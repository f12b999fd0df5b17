"""What a launcher without the live page sees of its ranks for the one that has it, while somebody looks at the page."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec

from paceline.launch.nodes.messages import Seen
from paceline.observe.live.lookout import Lookout
from paceline.observe.live.notes import Notes
from paceline.observe.live.sample import Bucket, Facts, RankSample, RankStep
from paceline.observe.watching import Watched

_EVERY_S = 1.0

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(tuple[RankSample, ...]).decode


class Outlook:
    """Looks at the workers of this machine each second until `close`.

    Args:
        workers: returns those that run.
        offset_s: returns what is to be added to this machine's clock to get that of the page's.
        send: is called with what is seen.
    """

    def __init__(
        self, workers: Callable[[], Iterable[Watched]], offset_s: Callable[[], float], send: Callable[[Seen], None]
    ) -> None:
        self._workers = workers
        self._offset_s = offset_s
        self._send = send
        self._notes = Notes()
        self._lookout = Lookout(self._notes, Facts(""))
        self._host = socket.gethostname()
        self._known: dict[int, int] = {}  # process ids by rank
        self.deadline_s = 0.0

    def tick(self, now_s: float) -> None:
        """Looks and sends what it sees, if that is due."""
        if now_s < self.deadline_s:
            return
        self.deadline_s = now_s + _EVERY_S
        for worker in self._workers():
            if worker.ending is None and self._known.get(worker.number) != worker.pid:
                self._known[worker.number] = worker.pid
                self._notes.leave_worker(worker.number, worker.pid, self._host, worker.recording)
        ranks = self._lookout.look().ranks
        if ranks:
            self._send(Seen(encode(ranks, self._offset_s())))

    def close(self) -> None:
        """Releases the recordings; idempotent."""
        self._lookout.close()


def encode(ranks: tuple[RankSample, ...], offset_s: float) -> str:
    """Returns samples as JSON, with their times on the page's clock, in about 2 KB a rank and second.

    Only the last step of a rank keeps its phases and buckets, since the page shows one step of them.
    """
    return _encode([_moved(each, offset_s) for each in ranks]).decode()


def decode(body: str) -> tuple[RankSample, ...]:
    """Returns the samples in `body`.

    Raises:
        ValueError: there are none.
    """
    return _decode(body)


def _moved(sample: RankSample, offset_s: float) -> RankSample:
    last = len(sample.steps) - 1
    steps = tuple(_step(each, offset_s, at == last) for at, each in enumerate(sample.steps))
    return replace(sample, heard_s=sample.heard_s + offset_s, steps=steps)


def _step(step: RankStep, offset_s: float, is_last: bool) -> RankStep:
    def at(time_s: float) -> float:
        return round(time_s + offset_s, 6)

    phases = tuple((name, at(begin), at(end)) for name, begin, end in step.phases) if is_last else ()
    buckets = tuple(Bucket(at(b.ready_s), at(b.sent_s), at(b.done_s), b.nbytes, b.name) for b in step.buckets)
    times = {name: round(value, 6) for name, value in vars(step).items() if name.endswith("_s")}
    times |= {"begin_s": at(step.begin_s), "end_s": at(step.end_s)}
    return replace(step, **times, phases=phases, buckets=buckets if is_last else ())
