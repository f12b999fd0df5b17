"""A donor's child: serves the snapshot that it is, and the donor's log, to one learner.

It is a fork of a process that has threads, so it uses nothing that another thread may have held in the middle of a
change: no torch, no group, and none of the descriptors that it inherits but its own.
"""

from __future__ import annotations

import gc
import mmap
import os
import queue
import select
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from paceline.elastic.failpoints import reach
from paceline.elastic.joining.chunks import Layout
from paceline.elastic.joining.log import LogReader
from paceline.elastic.joining.priority import at_low_priority, be_modest
from paceline.elastic.joining.wire import (
    CHANNEL,
    CHUNK_BYTES,
    NEAR,
    REQUEST,
    Ask,
    BrokenLessonError,
    Chunk,
    Contents,
    Entered,
    NothingYet,
    Stepped,
    digest_of_chunk,
    receive_into,
    send_head,
)
from paceline.parent import die_with_parent
from paceline.security.doorkeeper import Doorkeeper, Listener
from paceline.security.encryption import Connection

FIRST_S = 30.0  # how long the learner has to come
_PATIENCE_S = 30.0  # how long it may take nothing
_MOST_DESCRIPTORS = 1 << 20


@dataclass(frozen=True)
class Served:
    """What a child serves.

    Attributes:
        number: the lesson's.
        key: what the learner must hold.
        contents: of the snapshot.
        memories: its buffers.
        listener: where the learner connects.
        log: the donor's log.
        line: comes from the donor: a byte says that the log has grown, and the end that the donor has ended.
        progress: what the child tells the donor, see `Progress`.
    """

    number: int
    key: bytes
    contents: Contents
    memories: Sequence[memoryview]
    listener: Listener
    log: int
    line: socket.socket
    progress: Progress


class Progress:
    """Memory of a donor and its child, in which the child says how far the learner is.

    Attributes: `done`, up to where the log is not needed any more, and `sent`, which grows with all that is sent and is
    0 before the learner came.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._numbers = memoryview(self._memory).cast("Q")

    @property
    def done(self) -> int:
        """The size of the log that is not needed any more."""
        return self._numbers[0]

    @property
    def sent(self) -> int:
        """How often something was sent."""
        return self._numbers[1]

    def more(self, done: int) -> None:
        """Notes that something was sent, and that the log is not needed up to `done`."""
        self._numbers[0] = done
        self._numbers[1] += 1

    def close(self) -> None:
        """Gives the memory back."""
        self._numbers.release()
        self._memory.close()


def be_child(served: Served, donor_pid: int) -> NoReturn:
    """Serves one learner in a process that was just forked, and ends it; it never outlives the donor."""
    try:
        die_with_parent(donor_pid)
        gc.disable()  # what the donor left for the collector is the donor's to close
        _keep_only([served.listener.fileno(), served.log, served.line.fileno()])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _serve(served)
    except (OSError, BrokenLessonError):
        pass  # the learner or the donor is gone
    finally:
        be_modest()  # to give the memory back takes a while, too
        os._exit(0)


def _keep_only(descriptors: Sequence[int]) -> None:
    """Closes all descriptors but these; those of a terminal lead nowhere."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        if standard not in descriptors:
            os.dup2(null, standard)
    first = 3
    for kept in sorted(descriptors):
        os.closerange(first, max(first, kept))
        first = max(first, kept + 1)
    os.closerange(first, min(os.sysconf("SC_OPEN_MAX"), _MOST_DESCRIPTORS))


def _serve(served: Served) -> None:
    learner = at_low_priority(lambda: _await_learner(served))
    if learner is None:
        return
    learner.settimeout(_PATIENCE_S)
    served.line.setblocking(False)
    Serving(served, learner).run()


def _await_learner(served: Served) -> Connection | None:
    came: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    door = Doorkeeper(served.listener, served.key, CHANNEL, lambda each, _: came.put(each), served.number)
    try:
        return came.get(timeout=FIRST_S)
    except queue.Empty:
        return None
    finally:
        door.close()


class Serving:
    """The conversation with the learner."""

    def __init__(self, served: Served, learner: Connection) -> None:
        self._served, self._learner = served, learner
        self._layout = Layout(served.contents.sizes, CHUNK_BYTES)
        self._log = LogReader(served.log)
        self._awaited: tuple[int, int, int] | None = None  # a round, a generation and a number of steps
        self._request = memoryview(bytearray(REQUEST.size))
        self._is_near = False  # the learner has been
        self._passed = 0, 0  # the round that the learner is in, and how many of its steps it has

    def run(self) -> None:
        """Answers until the learner or the donor is gone; at low priority until the learner has come near.

        From then on the others may be in the next view already, and wait until it has the last result before that.

        Raises:
            BrokenLessonError, OSError: one of them is.
        """
        at_low_priority(self._begin)
        while self._goes_on():
            pass

    def _begin(self) -> None:
        send_head(self._learner, self._served.contents)
        self._tell_donor()
        while not self._is_near and self._goes_on():
            pass

    def _goes_on(self) -> bool:
        """Waits for what the learner asks, or the donor logs, and answers; returns False if the donor is gone."""
        ready, _, _ = select.select([self._learner, self._served.line], [], [])
        if self._served.line in ready:
            if not self._served.line.recv(4096):
                return False
            self._tell_donor()  # the learner may have got from another donor what has come now
        if self._awaited is not None:
            self._give_awaited()
        if self._learner in ready:
            receive_into(self._learner, self._request)
            self._answer(*REQUEST.unpack(self._request))
        return True

    def _answer(self, ask: int, first: int, second: int, third: int) -> None:
        match ask:
            case Ask.CHUNK if first < self._layout.count:
                self._give_chunk(first)
            case Ask.ITEM:
                self._pass(first, third)
                self._awaited = first, second, third
                if not self._give_awaited():
                    self._is_near = True
                    send_head(self._learner, NothingYet())
            case Ask.FORGET:
                self._pass(first, third)
            case _:
                raise BrokenLessonError(f"the learner asked for {ask} {first} {second} {third}")

    def _give_chunk(self, number: int) -> None:
        spans = self._layout.spans(number)
        parts = [self._served.memories[buffer][first:stop] for buffer, first, stop in spans]
        head = Chunk(number, sum(map(len, parts)), digest_of_chunk(parts))
        send_head(self._learner, head)
        reach("join.sending")
        for part in parts:
            self._learner.sendall(part)
        self._tell_donor()

    def _give_awaited(self) -> bool:
        assert self._awaited is not None
        entry = self._log.next(*self._awaited)
        if entry is None:
            return False
        self._awaited = None
        item = entry.item
        self._is_near = self._is_near or isinstance(item, Entered) or self._log.ahead <= NEAR
        if isinstance(item, Stepped):  # digested here, since the members would have to wait for it
            item = msgspec.structs.replace(item, digest=self._log.digest_of(entry))
        send_head(self._learner, item, self._log.ahead)
        self._send_log(entry.body, entry.stop)
        self._tell_donor()
        return True

    def _send_log(self, first: int, stop: int) -> None:
        at = first
        while at < stop:
            if not select.select([], [self._learner], [], _PATIENCE_S)[1]:
                raise BrokenLessonError("the learner takes nothing")
            if isinstance(self._learner, socket.socket):
                at += os.sendfile(self._learner.fileno(), self._log.file, at, stop - at)
            else:
                part = os.pread(self._log.file, min(stop - at, CHUNK_BYTES), at)
                self._learner.sendall(part)
                at += len(part)

    def _pass(self, round_: int, steps: int) -> None:
        self._passed = max(self._passed, (round_, steps))
        self._tell_donor()

    def _tell_donor(self) -> None:
        self._served.progress.more(self._log.forget(*self._passed))
