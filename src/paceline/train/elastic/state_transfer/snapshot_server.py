"""A sender's child: serves the snapshot that it is, and the sender's log, to one receiver.

It is a fork of a process that has threads, so it uses nothing that another thread may have held in the middle of a
change: no torch, no group, and none of the descriptors that it inherits but its own.

The log of a sender: the results of the rounds since its snapshot, in memory that its child reads.

The file has a name in no folder. The sender appends to it, and never waits: its size tells the child how much is there.
The child gives the memory of results back that the receiver has got.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import queue
import select
import signal
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec
import xxhash

from paceline.comm.security.authenticated_listener import AuthenticatedListener, ListeningEndpoint
from paceline.comm.security.encryption import Connection
from paceline.linux import die_with_parent, memfd_create
from paceline.train.elastic.failpoints import failpoint
from paceline.train.elastic.process_priority import lower_thread_priority, run_at_low_priority
from paceline.train.elastic.state_transfer.transfer_protocol import (
    CHANNEL,
    CHUNK_BYTES,
    NEAR,
    REQUEST,
    BrokenTransferError,
    ChunkLayout,
    LogItem,
    NothingYet,
    OptimizerStep,
    RequestKind,
    RoundResult,
    SnapshotChunk,
    SnapshotContents,
    ViewEntered,
    body_bytes,
    decode_head,
    digest_of_chunk,
    encode_head,
    receive_into,
    send_head,
)

_LENGTH = struct.Struct("<Q")  # of the head that follows
_PIECES = 512  # that one system call writes
_PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None)


def new_log() -> int:
    """Returns the descriptor of an empty log.

    Raises:
        OSError: there are no descriptors, or no memory.
    """
    return memfd_create("paceline-results")


def append(log: int, item: LogItem, body: Sequence[memoryview] = ()) -> int:
    """Appends to a log; returns its size.

    Raises:
        OSError: there is no memory.
    """
    head = encode_head(item)
    pieces = [memoryview(_LENGTH.pack(len(head))), memoryview(head), *(each for each in body if len(each))]
    while pieces:
        count = os.writev(log, pieces[:_PIECES])
        while pieces and count >= len(pieces[0]):
            count -= len(pieces[0])
            del pieces[0]
        if count:
            pieces[0] = pieces[0][count:]
    return os.lseek(log, 0, os.SEEK_CUR)


@dataclass(frozen=True)
class LogEntry:
    """Where an item lies in a log: its head, and its body, which ends at `stop`."""

    item: LogItem
    body: int
    stop: int


class LogReader:
    """The child's view of a log, with reads that do not move the place at which the sender writes."""

    def __init__(self, log: int) -> None:
        self.file = log
        self._entries: list[LogEntry] = []
        self._stop = 0
        self._done = 0  # where the memory that was given back ends

    @property
    def ahead(self) -> int:
        """How many results are there that the receiver has not got."""
        return sum(isinstance(entry.item, RoundResult) for entry in self._entries)

    def next(self, round_: int, generation: int, steps: int = 0) -> LogEntry | None:
        """Returns what a receiver needs in that round; None if it is not there yet.

        Args:
            round_: the round.
            generation: the latest view of which the receiver knows that the members have entered it.
            steps: how many steps of optimizers it has got of this round.
        """
        self._read()
        for entry in self._entries:
            match entry.item:
                case item if item.round != round_:
                    continue
                case OptimizerStep() if steps > 0:
                    steps -= 1
                case ViewEntered(generation=entered) if entered <= generation:
                    continue
                case _:
                    return entry
        return None

    def forget(self, round_: int, steps: int = 0) -> int:
        """Gives back the memory of what comes before a round.

        Returns:
            Up to where a receiver has the log that has so many steps of that round, too.
        """
        self._read()
        kept = [entry for entry in self._entries if entry.item.round >= round_]
        gone = self._entries[: len(self._entries) - len(kept)]
        self._entries = kept
        if gone:
            self._done = gone[-1].stop
            _libc.fallocate(self.file, _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(self._done))
        own = [entry.stop for entry in kept if entry.item.round == round_ and isinstance(entry.item, OptimizerStep)]
        return max([self._done, *own[:steps]])

    def digest_of(self, entry: LogEntry) -> bytes:
        """Returns the digest of an entry's body."""
        total = xxhash.xxh3_128(seed=0)
        for at in range(entry.body, entry.stop, CHUNK_BYTES):
            total.update(os.pread(self.file, min(CHUNK_BYTES, entry.stop - at), at))
        return total.digest()

    def _read(self) -> None:
        size = os.fstat(self.file).st_size
        while self._stop + _LENGTH.size <= size:
            at = self._stop + _LENGTH.size
            (length,) = _LENGTH.unpack(os.pread(self.file, _LENGTH.size, self._stop))
            if at + length > size:
                return
            item = decode_head(os.pread(self.file, length, at))
            assert isinstance(item, (RoundResult, OptimizerStep, ViewEntered))
            stop = at + length + body_bytes(item)
            if stop > size:
                return
            self._entries.append(LogEntry(item, at + length, stop))
            self._stop = stop


FIRST_S = 30.0  # how long the receiver has to come
_PATIENCE_S = 30.0  # how long it may take nothing
_MOST_DESCRIPTORS = 1 << 20


@dataclass(frozen=True)
class ServedSnapshot:
    """What a child serves.

    Attributes:
        number: the transfer's.
        key: what the receiver must hold.
        contents: of the snapshot.
        memories: its buffers.
        listener: where the receiver connects.
        log: the sender's log.
        line: comes from the sender: a byte says that the log has grown, and the end that the sender has ended.
        progress: what the child tells the sender, see `Progress`.
    """

    number: int
    key: bytes
    contents: SnapshotContents
    memories: Sequence[memoryview]
    listener: ListeningEndpoint
    log: int
    line: socket.socket
    progress: TransferProgress


class TransferProgress:
    """Memory of a sender and its child, in which the child says how far the receiver is.

    Attributes: `done`, up to where the log is not needed any more, and `sent`, which grows with all that is sent and is
    0 before the receiver came.
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


def serve_in_child(served: ServedSnapshot, sender_pid: int) -> NoReturn:
    """Serves one receiver in a process that was just forked, and ends it; it never outlives the sender."""
    try:
        die_with_parent(sender_pid)
        gc.disable()  # what the sender left for the collector is the sender's to close
        _keep_only([served.listener.fileno(), served.log, served.line.fileno()])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _serve(served)
    except (OSError, BrokenTransferError):
        pass  # the receiver or the sender is gone
    finally:
        lower_thread_priority()  # to give the memory back takes a while, too
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


def _serve(served: ServedSnapshot) -> None:
    receiver = run_at_low_priority(lambda: _await_receiver(served))
    if receiver is None:
        return
    receiver.settimeout(_PATIENCE_S)
    served.line.setblocking(False)
    SnapshotServer(served, receiver).run()


def _await_receiver(served: ServedSnapshot) -> Connection | None:
    came: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    door = AuthenticatedListener(served.listener, served.key, CHANNEL, lambda each, _: came.put(each), served.number)
    try:
        return came.get(timeout=FIRST_S)
    except queue.Empty:
        return None
    finally:
        door.close()


class SnapshotServer:
    """The conversation with the receiver."""

    def __init__(self, served: ServedSnapshot, receiver: Connection) -> None:
        self._served, self._receiver = served, receiver
        self._layout = ChunkLayout(served.contents.sizes, CHUNK_BYTES)
        self._log = LogReader(served.log)
        self._awaited: tuple[int, int, int] | None = None  # a round, a generation and a number of steps
        self._request = memoryview(bytearray(REQUEST.size))
        self._is_near = False  # the receiver has been
        self._passed = 0, 0  # the round that the receiver is in, and how many of its steps it has

    def run(self) -> None:
        """Answers until the receiver or the sender is gone; at low priority until the receiver has come near.

        From then on the others may be in the next view already, and wait until it has the last result before that.

        Raises:
            BrokenTransferError, OSError: one of them is.
        """
        run_at_low_priority(self._begin)
        while self._goes_on():
            pass

    def _begin(self) -> None:
        send_head(self._receiver, self._served.contents)
        self._tell_sender()
        while not self._is_near and self._goes_on():
            pass

    def _goes_on(self) -> bool:
        """Waits for what the receiver asks, or the sender logs, and answers; returns False if the sender is gone."""
        ready, _, _ = select.select([self._receiver, self._served.line], [], [])
        if self._served.line in ready:
            if not self._served.line.recv(4096):
                return False
            self._tell_sender()  # the receiver may have got from another sender what has come now
        if self._awaited is not None:
            self._give_awaited()
        if self._receiver in ready:
            receive_into(self._receiver, self._request)
            self._answer(*REQUEST.unpack(self._request))
        return True

    def _answer(self, ask: int, first: int, second: int, third: int) -> None:
        match ask:
            case RequestKind.CHUNK if first < self._layout.count:
                self._give_chunk(first)
            case RequestKind.ITEM:
                self._pass(first, third)
                self._awaited = first, second, third
                if not self._give_awaited():
                    self._is_near = True
                    send_head(self._receiver, NothingYet())
            case RequestKind.FORGET:
                self._pass(first, third)
            case _:
                raise BrokenTransferError(f"the receiver asked for {ask} {first} {second} {third}")

    def _give_chunk(self, number: int) -> None:
        spans = self._layout.spans(number)
        parts = [self._served.memories[buffer][first:stop] for buffer, first, stop in spans]
        head = SnapshotChunk(number, sum(map(len, parts)), digest_of_chunk(parts))
        send_head(self._receiver, head)
        failpoint("join.sending")
        for part in parts:
            self._receiver.sendall(part)
        self._tell_sender()

    def _give_awaited(self) -> bool:
        assert self._awaited is not None
        entry = self._log.next(*self._awaited)
        if entry is None:
            return False
        self._awaited = None
        item = entry.item
        self._is_near = self._is_near or isinstance(item, ViewEntered) or self._log.ahead <= NEAR
        if isinstance(item, OptimizerStep):  # digested here, since the members would have to wait for it
            item = msgspec.structs.replace(item, digest=self._log.digest_of(entry))
        send_head(self._receiver, item, self._log.ahead)
        self._send_log(entry.body, entry.stop)
        self._tell_sender()
        return True

    def _send_log(self, first: int, stop: int) -> None:
        at = first
        while at < stop:
            if not select.select([], [self._receiver], [], _PATIENCE_S)[1]:
                raise BrokenTransferError("the receiver takes nothing")
            if isinstance(self._receiver, socket.socket):
                at += os.sendfile(self._receiver.fileno(), self._log.file, at, stop - at)
            else:
                part = os.pread(self._log.file, min(stop - at, CHUNK_BYTES), at)
                self._receiver.sendall(part)
                at += len(part)

    def _pass(self, round_: int, steps: int) -> None:
        self._passed = max(self._passed, (round_, steps))
        self._tell_sender()

    def _tell_sender(self) -> None:
        self._served.progress.more(self._log.forget(*self._passed))
