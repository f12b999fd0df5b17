"""The sender's forked child, which serves its snapshot and the sender's log to one receiver.

The child is forked from a process with threads, so it must not use anything that another thread may have left in an
inconsistent state, such as torch or the group. The child closes all inherited descriptors that it does not need.

The log contains the results of the rounds after the snapshot, in an anonymous memory file. The sender appends items
without waiting, and the child determines the amount of data from the file size. The child frees the memory of results
once they have been received.
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
    LogEndReached,
    LogItem,
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

_LENGTH = struct.Struct("<Q")  # the length of the head, which follows
_PIECES = 512  # maximum number of buffers per system call
_PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE
_libc = ctypes.CDLL(None)


def new_log() -> int:
    """Returns the descriptor of an empty log; raises OSError if descriptors or memory are exhausted."""
    return memfd_create("paceline-results")


def append(log: int, item: LogItem, body: Sequence[memoryview] = ()) -> int:
    """Appends an item to a log and returns the log's size; raises OSError if memory is exhausted."""
    head = encode_head(item)
    pieces = [memoryview(_LENGTH.pack(len(head))), memoryview(head), *(part for part in body if len(part))]
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
    """An item in a log: its head, and the byte range of its body."""

    item: LogItem
    body: int
    stop: int


class LogReader:
    """Reads a log in the child, without moving the file offset at which the sender writes."""

    def __init__(self, log: int) -> None:
        self.file = log
        self._entries: list[LogEntry] = []
        self._stop = 0
        self._done = 0  # the offset up to which memory has been freed

    @property
    def ahead(self) -> int:
        """The number of results that the receiver does not have yet."""
        return sum(isinstance(entry.item, RoundResult) for entry in self._entries)

    def next(self, round_: int, generation: int, steps: int = 0) -> LogEntry | None:
        """Returns the next entry that a receiver needs in a round, or None if it has not been logged yet.

        The receiver already has the views up to `generation`, and the first `steps` optimizer steps of this round.
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
        """Frees the memory of all entries before a round.

        Returns the offset up to which the receiver has the log if it has `steps` optimizer steps of that round.
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
        for offset in range(entry.body, entry.stop, CHUNK_BYTES):
            total.update(os.pread(self.file, min(CHUNK_BYTES, entry.stop - offset), offset))
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


FIRST_S = 30.0  # time for the receiver to connect
_PATIENCE_S = 30.0  # maximum time without progress
_MOST_DESCRIPTORS = 1 << 20


@dataclass(frozen=True)
class ServedSnapshot:
    """The resources of the child that serves a snapshot."""

    number: int  # the transfer number
    key: bytes  # the key that the receiver must hold
    contents: SnapshotContents
    memories: Sequence[memoryview]  # the snapshot's buffers
    listener: ListeningEndpoint  # the receiver connects to it
    log: int  # the descriptor of the sender's log
    line: socket.socket  # to the sender: a byte means that the log has grown, end of file that the sender has exited
    progress: TransferProgress


class TransferProgress:
    """Memory shared by a sender and its child, through which the child reports the receiver's progress."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._numbers = memoryview(self._memory).cast("Q")

    @property
    def done(self) -> int:
        """The offset up to which the log is no longer needed."""
        return self._numbers[0]

    @property
    def sent(self) -> int:
        """The number of progress reports so far, or 0 before the receiver has connected."""
        return self._numbers[1]

    def more(self, done: int) -> None:
        """Records progress, and that the log up to `done` is no longer needed."""
        self._numbers[0] = done
        self._numbers[1] += 1

    def close(self) -> None:
        """Frees the memory."""
        self._numbers.release()
        self._memory.close()


def serve_in_child(served: ServedSnapshot, sender_pid: int) -> NoReturn:
    """Serves one receiver in a newly forked process, which then exits. The process never outlives the sender."""
    try:
        die_with_parent(sender_pid)
        gc.disable()  # only the sender may finalize inherited objects
        _keep_only([served.listener.fileno(), served.log, served.line.fileno()])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if (receiver := run_at_low_priority(lambda: _await_receiver(served))) is not None:
            receiver.settimeout(_PATIENCE_S)
            served.line.setblocking(False)
            SnapshotServer(served, receiver).run()
    except (OSError, BrokenTransferError):
        pass  # the receiver or the sender has disconnected
    finally:
        lower_thread_priority()  # freeing the memory takes time
        os._exit(0)


def _keep_only(descriptors: Sequence[int]) -> None:
    """Closes all descriptors except `descriptors`, and redirects the standard streams to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        if standard not in descriptors:
            os.dup2(null, standard)
    first = 3
    for kept in sorted(descriptors):
        os.closerange(first, max(first, kept))
        first = max(first, kept + 1)
    os.closerange(first, min(os.sysconf("SC_OPEN_MAX"), _MOST_DESCRIPTORS))


def _await_receiver(served: ServedSnapshot) -> Connection | None:
    receivers: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    listener = AuthenticatedListener(
        served.listener, served.key, CHANNEL, lambda receiver, _: receivers.put(receiver), served.number
    )
    try:
        return receivers.get(timeout=FIRST_S)
    except queue.Empty:
        return None
    finally:
        listener.close()


class SnapshotServer:
    """Serves a snapshot and the log over the connection to the receiver."""

    def __init__(self, served: ServedSnapshot, receiver: Connection) -> None:
        self._served, self._receiver = served, receiver
        self._layout = ChunkLayout(served.contents.sizes, CHUNK_BYTES)
        self._log = LogReader(served.log)
        self._awaited: tuple[int, int, int] | None = None  # requested round, generation and number of steps
        self._request = memoryview(bytearray(REQUEST.size))
        self._is_near = False  # whether the receiver has ever been at most `NEAR` results behind
        self._passed = 0, 0  # the receiver's round, and its number of steps in that round

    def run(self) -> None:
        """Answers requests until the sender exits; raises BrokenTransferError or OSError if either end disconnects.

        The child runs at low priority only until the receiver has almost caught up. After that, the members may already
        be in the next view, where they wait until the receiver has the last result before that view.
        """
        run_at_low_priority(self._begin)
        while self._serve_next():
            pass

    def _begin(self) -> None:
        send_head(self._receiver, self._served.contents)
        self._notify_sender()
        while not self._is_near and self._serve_next():
            pass

    def _serve_next(self) -> bool:
        """Waits for a request or a new log entry and responds; returns False if the sender has exited."""
        ready, _, _ = select.select([self._receiver, self._served.line], [], [])
        if self._served.line in ready:
            if not self._served.line.recv(4096):
                return False
            self._notify_sender()  # another sender may have served the new entry
        if self._awaited is not None:
            self._give_awaited()
        if self._receiver in ready:
            receive_into(self._receiver, self._request)
            self._answer(*REQUEST.unpack(self._request))
        return True

    def _answer(self, request: int, first: int, second: int, third: int) -> None:
        match request:
            case RequestKind.CHUNK if first < self._layout.count:
                self._give_chunk(first)
            case RequestKind.ITEM:
                self._pass(first, third)
                self._awaited = first, second, third
                if not self._give_awaited():
                    self._is_near = True
                    send_head(self._receiver, LogEndReached())
            case RequestKind.FORGET:
                self._pass(first, third)
            case _:
                raise BrokenTransferError(f"the receiver asked for {request} {first} {second} {third}")

    def _give_chunk(self, number: int) -> None:
        spans = self._layout.spans(number)
        parts = [self._served.memories[buffer][first:stop] for buffer, first, stop in spans]
        head = SnapshotChunk(number, sum(map(len, parts)), digest_of_chunk(parts))
        send_head(self._receiver, head)
        failpoint("join.sending")
        for part in parts:
            self._receiver.sendall(part)
        self._notify_sender()

    def _give_awaited(self) -> bool:
        assert self._awaited is not None
        entry = self._log.next(*self._awaited)
        if entry is None:
            return False
        self._awaited = None
        item = entry.item
        self._is_near = self._is_near or isinstance(item, ViewEntered) or self._log.ahead <= NEAR
        if isinstance(item, OptimizerStep):  # the child computes the digest, so that the members do not have to
            item = msgspec.structs.replace(item, digest=self._log.digest_of(entry))
        send_head(self._receiver, item, self._log.ahead)
        self._send_log(entry.body, entry.stop)
        self._notify_sender()
        return True

    def _send_log(self, first: int, stop: int) -> None:
        at = first
        while at < stop:
            if not select.select([], [self._receiver], [], _PATIENCE_S)[1]:
                raise BrokenTransferError("the receiver does not read any data")
            if isinstance(self._receiver, socket.socket):
                at += os.sendfile(self._receiver.fileno(), self._log.file, at, stop - at)
            else:
                part = os.pread(self._log.file, min(stop - at, CHUNK_BYTES), at)
                self._receiver.sendall(part)
                at += len(part)

    def _pass(self, round_: int, steps: int) -> None:
        self._passed = max(self._passed, (round_, steps))
        self._notify_sender()

    def _notify_sender(self) -> None:
        self._served.progress.more(self._log.forget(*self._passed))
