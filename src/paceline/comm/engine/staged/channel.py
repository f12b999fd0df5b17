"""`StagedGroup` and `StagedChannel`, which implement a group for accelerator tensors on top of a group for CPU tensors.

The channel's thread divides each call into chunks. A chunk passes through three stages: one stream copies it to host
memory, the thread performs the call on the copy, and another stream copies the result back. While the thread performs
the call for one chunk, the streams copy the chunks before and after it.

The streams wait for work that the program enqueued before the call, and `StagedWork.wait` makes the program's current
stream wait for the results. `StagedWork.wait` also blocks the program's thread until the last copy to the device has
been enqueued, because a stream cannot wait for an event that does not exist yet.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline import _core
from paceline.comm.engine.adapters.device_streams import (
    AcceleratorEvent,
    AcceleratorStream,
    activated,
    is_capturing,
    record_current,
    with_index,
)
from paceline.comm.engine.adapters.group_recorder import GroupRecorder, HasRecorder, RecordedWork
from paceline.comm.engine.api import OpenGroup
from paceline.comm.engine.channel import (
    NO_REDUCTION,
    CallFailure,
    CallOutcome,
    CollectiveCall,
    EngineChannel,
    HeaderFields,
    OutcomeCode,
    ReduceOp,
    dtype_name,
)
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.staged.memory import PinnedMemory, StagedLayout, copy_to_device, copy_to_host, divide
from paceline.comm.engine.staged.messages import StagedMessages, capture_text
from paceline.comm.record.layout import DTYPES, EventKind
from paceline.comm.record.spans import begin_event
from paceline.comm.schedule.steps import Operation
from paceline.durations import LONGEST_S, event_timeout_s, to_nanoseconds

SLOT_BYTES = 8 << 20
"""The size of a slot, which holds one chunk. Smaller chunks improve the overlap, and larger chunks need fewer calls."""

SLOTS = 3
"""The number of chunks in progress at a time; a group allocates `SLOTS * SLOT_BYTES` bytes of pinned memory.

More slots are slower, because chunks leave the processor's cache before the core reads them.
"""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 200e-6
_SPINS = 50  # the number of times an event is polled before the thread pauses
_RETIRE_S = 0.001
_CLOSE_S = 1.0
_HEADER_FIELDS = 7
_INT64 = DTYPES.index("int64")


class StagedWork:
    """A call in progress; see `engine.channel.StreamCall`."""

    def __init__(
        self, layout: StagedLayout, header: HeaderFields, start: AcceleratorEvent, recorded: RecordedWork
    ) -> None:
        self.layout: StagedLayout | None = layout
        self.header = header
        self.start = start
        self.recorded = recorded
        self.timeout_ns = layout.call.timeout_ns
        self.chunks: int | None = None  # None until the ranks have exchanged their sizes
        self.issued = 0
        self._enqueued = threading.Event()
        self._outcome: CallOutcome | None = None
        self._end: AcceleratorEvent | None = None

    def end(self, outcome: CallOutcome | None, end: AcceleratorEvent | None = None) -> None:
        """Marks the call as failed or as enqueued, with `end` as the event after its last copy, if there is one."""
        self._outcome, self._end = outcome, end
        self._enqueued.set()
        _core.announce_completion()  # wakes the completion thread

    def is_enqueued(self) -> bool:
        """Returns True if the call has failed or all of its copies have been enqueued."""
        return self._enqueued.is_set()

    def done(self) -> bool:
        """Returns True if the call has failed or its results are on the device."""
        return self._enqueued.is_set() and (self._outcome is not None or self._end is None or self._end.done())

    def wait(self, timeout_ns: int, /) -> bool:
        """Waits until all copies are enqueued and makes the current stream wait for them; returns False on timeout."""
        if not self._enqueued.wait(event_timeout_s(timeout_ns)):
            return False
        if self._end is not None:
            self._end.order()
        return True

    def outcome(self) -> CallOutcome | None:
        """Returns the reason why the call failed, or None if it succeeded."""
        return self._outcome


@dataclass
class _Chunk:
    """A chunk in progress. If `copied` is set, the thread may use the slot only after this event."""

    work: StagedWork
    number: int
    slot: int
    copied: AcceleratorEvent | None
    stamp: int


class StagedChannel(HasRecorder, EngineChannel):
    """Runs calls on device tensors over `inner`, in the order in which they are made; thread-safe.

    Args:
        inner: the same ranks' channel for CPU tensors. It must not be used elsewhere, and is not closed by this
            channel.
    """

    def __init__(
        self, inner: EngineChannel, device: torch.device, recorder: GroupRecorder, rank: int, size: int
    ) -> None:
        self.inner = inner
        self._device = device
        self._recorder = recorder
        self._rank = rank
        self._size = size
        self._to_host = AcceleratorStream(device)
        self._to_device = AcceleratorStream(device)
        self._memory: PinnedMemory | None = None
        self._slot_free: list[AcceleratorEvent | None] = [None] * SLOTS  # per slot: recorded after the last read
        self._next_slot = 0
        self._sequence = 0
        self._arrived = threading.Condition()
        self._works: deque[StagedWork] = deque()  # calls with chunks that have not been issued
        self._unfinished: deque[tuple[StagedWork, AcceleratorEvent]] = deque()
        self._thread: threading.Thread | None = None
        self._failure: CallOutcome | None = None  # permanent once set
        self._closed = False

    def run(self, call: CollectiveCall, /) -> CallOutcome | None:
        """Runs a call. The current stream waits for the call, and the thread waits until the last copy is enqueued."""
        work = self._queue(call, is_async=False)
        work.wait(to_nanoseconds(LONGEST_S))
        return work.outcome()

    def submit(self, call: CollectiveCall, /) -> StagedWork:
        """Queues a call after the earlier ones and returns immediately.

        Raises:
            TypeError: the reduction is not defined for the dtype.
            RuntimeError: the current stream is being captured into a graph.
        """
        return self._queue(call, is_async=True)

    def abort(self) -> None:
        """Aborts current and later calls, including those on the other ranks if the inner channel supports it."""
        self._break(CallFailure(OutcomeCode.ABORTED))
        self.inner.abort()

    def failure(self) -> int:
        """Returns the code of the failure that broke the channel, or OK."""
        return self.inner.failure() if self._failure is None else self._failure.code

    def close(self) -> None:
        """Cancels queued calls and stops the thread; idempotent. The inner channel must be closed first.

        If the device takes a long time to complete enqueued copies, the channel's thread waits for them in the
        background.
        """
        self._break(CallFailure(OutcomeCode.INTERRUPTED))
        with self._arrived:
            self._closed = True
            self._arrived.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def _queue(self, call: CollectiveCall, is_async: bool) -> StagedWork:
        if call.reduce_op != NO_REDUCTION and not _core.reduces(call.dtype, call.reduce_op):
            raise TypeError(
                f"{call.operation}: {ReduceOp(call.reduce_op).name} is not defined for torch.{dtype_name(call.dtype)}; "
                "convert the tensor first"
            )
        if is_capturing(self._device):
            raise RuntimeError(capture_text(str(call.operation), self._device))
        layout = divide(call, self._rank, self._size, SLOT_BYTES)
        start = record_current(self._device, timing=True)
        with self._arrived:
            self._sequence += 1
            header = (self._sequence, call.operation, call.dtype, call.reduce_op, call.root, call.count)
            recorded = self._recorder.call(call, is_async)
            recorded.follow(self._device, start)
            work = StagedWork(layout, header, start, recorded)
            if self._failure is not None:
                self._end(work, self._failure)
                return work
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paceline-staged", daemon=True)
                self._thread.start()
            self._arrived.notify()
        return work

    def _run(self) -> None:
        chunks: deque[_Chunk] = deque()  # chunks whose copies to the host are enqueued
        with activated(self._device):
            while self._await_work(bool(chunks)):
                try:
                    if self._failure is None:
                        self._fill(chunks)
                        if chunks:
                            self._advance(chunks[0])
                            chunks.popleft()
                except Exception as error:  # for example a device error, which would otherwise go unreported
                    self._give_up(error)
                if self._failure is not None:
                    self._drop(chunks)
            self._close_memory()

    def _await_work(self, has_chunks: bool) -> bool:
        """Waits for a call, retiring completed calls in the meantime; returns False if the thread must exit."""
        while True:
            try:
                self._retire()
            except Exception as error:
                self._unfinished.clear()
                self._give_up(error)
            with self._arrived:
                if self._closed and not has_chunks and not self._works:
                    return False
                if has_chunks or self._works:
                    return True
                self._arrived.wait(_RETIRE_S if self._unfinished else None)

    def _fill(self, chunks: deque[_Chunk]) -> None:
        """Enqueues copies to the host until all slots are in use."""
        while len(chunks) < SLOTS:
            with self._arrived:
                work = self._works[0] if self._works else None
            if work is None or (work.chunks is not None and work.issued == work.chunks):
                return
            layout = work.layout
            assert layout is not None
            if work.issued == 0:
                if layout.call.operation != Operation.ALL_TO_ALL:
                    work.chunks = layout.chunks_of(layout.longest_nbytes)
                self._to_host.follow(work.start)
                self._to_device.follow(work.start)
            elif work.chunks is None:
                return  # the ranks must exchange sizes before the second chunk
            chunks.append(self._issue(work, layout))
            if work.chunks is not None and work.issued == work.chunks:
                with self._arrived:
                    self._works.popleft()

    def _issue(self, work: StagedWork, layout: StagedLayout) -> _Chunk:
        """Enqueues the copies of a call's next chunk to the host."""
        number, slot = work.issued, self._next_slot
        work.issued += 1
        self._next_slot = (slot + 1) % SLOTS
        free = self._slot_free[slot]
        if free is not None:
            self._to_host.follow(free)
        stamp = 0
        if work.chunks != 1:
            stamp = begin_event(EventKind.CHUNK, str(layout.call.operation), number, layout.part_nbytes)
        copies = False
        with self._to_host.current():
            for buffer, offset, start, stop in layout.parts(number):
                if buffer.source is not None and start < stop:
                    host = self._slot(slot)[offset : offset + stop - start]
                    copy_to_host(host, buffer.source.part(start, stop))
                    copies = True
        return _Chunk(work, number, slot, self._to_host.record() if copies else free, stamp)

    def _advance(self, chunk: _Chunk) -> None:
        """Performs the call for a chunk once its data is in host memory, and enqueues the copies back to the device."""
        try:
            self._make_call(chunk)
        finally:
            if chunk.stamp:
                _core.record_end(chunk.stamp)

    def _make_call(self, chunk: _Chunk) -> None:
        work, layout = chunk.work, chunk.work.layout
        if work.is_enqueued() or layout is None:  # an earlier chunk failed
            return
        outcome = self._await_device(chunk)
        if outcome is None and chunk.number == 0 and work.chunks != 1:
            outcome = self._agree(work, layout)
        if outcome is None:
            address = self._slot(chunk.slot).data_ptr()
            outcome = self.inner.run(layout.chunk_call(chunk.number, address, work.timeout_ns))
            if outcome is not None:
                outcome = self._explained(work, layout, chunk.number, outcome)
        if outcome is not None:
            self._fail(work, outcome)
            return
        with self._to_device.current():
            for buffer, offset, start, stop in layout.parts(chunk.number):
                if buffer.target is not None and start < stop:
                    host = self._slot(chunk.slot)[offset : offset + stop - start]
                    copy_to_device(buffer.target.part(start, stop), host)
        is_last = chunk.number + 1 == work.chunks
        event = self._slot_free[chunk.slot] = self._to_device.record(timing=is_last)
        if is_last:
            work.recorded.end_behind(event)
            self._unfinished.append((work, event))
            work.end(None, event)

    def _await_device(self, chunk: _Chunk) -> CallOutcome | None:
        """Waits until the device has copied the chunk; returns the failure if the call fails first."""
        event = chunk.copied
        if event is None:
            return self._failure
        started_ns = time.monotonic_ns()
        pause_s, polls = _FIRST_PAUSE_S, 0
        while not event.done():
            polls += 1
            if self._failure is not None:
                return self._failure
            if polls < _SPINS:
                continue
            waited_ns = time.monotonic_ns() - started_ns
            if waited_ns > chunk.work.timeout_ns:
                failure = CallFailure(OutcomeCode.TIMED_OUT, missing=[self._rank], has_begun=True, waited_ns=waited_ns)
                self._break(failure)
                return failure
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return self._failure

    def _agree(self, work: StagedWork, layout: StagedLayout) -> CallOutcome | None:
        """Compares the ranks' calls before the first of several chunks and determines the number of chunks."""
        headers = self._exchange(work, layout)
        if not isinstance(headers, list):
            return headers
        if any(header[:-1] != headers[0][:-1] for header in headers):  # in an all_to_all, the lengths may differ
            return _mismatch(headers)
        if work.chunks is None:
            work.chunks = layout.chunks_of(max(header[-1] for header in headers))
            if work.chunks == 1:
                with self._arrived:
                    self._works.popleft()
        return None

    def _explained(self, work: StagedWork, layout: StagedLayout, chunk: int, outcome: CallOutcome) -> CallOutcome:
        """Converts the outcome of a chunk's call to the outcome of the whole call."""
        if outcome.code == OutcomeCode.MISMATCH and outcome.split_from >= 0:
            before = chunk * layout.part_nbytes
            return CallFailure.of(
                outcome, split_sent=before + outcome.split_sent, split_expected=before + outcome.split_expected
            )
        if outcome.code == OutcomeCode.MISMATCH and self.inner.failure() == OutcomeCode.OK:
            # All ranks receive this outcome. Some ranks may have begun a call with several chunks.
            headers = self._exchange(work, layout)
            if isinstance(headers, list):
                return _mismatch(headers)
        # The other ranks' latest calls are for chunks, which are meaningless to the user.
        return outcome if outcome.code == OutcomeCode.MISMATCH else CallFailure.of(outcome, calls=(), algorithms=())

    def _exchange(self, work: StagedWork, layout: StagedLayout) -> list[list[int]] | CallOutcome:
        """Returns the ranks' headers, each with the length of the rank's longest buffer."""
        mine = torch.tensor([*work.header, layout.longest_nbytes], dtype=torch.int64, device="cpu")
        everyones = torch.empty(self._size, _HEADER_FIELDS, dtype=torch.int64, device="cpu")
        outputs = [[row.data_ptr(), row.nbytes] for row in everyones]
        outcome = self.inner.run(
            CollectiveCall(
                Operation.ALL_GATHER,
                _INT64,
                NO_REDUCTION,
                -1,
                _HEADER_FIELDS,
                work.timeout_ns,
                [[mine.data_ptr(), mine.nbytes]],
                outputs,
            )
        )
        if outcome is None:
            headers: list[list[int]] = everyones.tolist()
            return headers
        if outcome.code == OutcomeCode.MISMATCH and self.inner.failure() == OutcomeCode.OK:
            # Another rank's call has a single chunk, so it did not begin with this exchange. That rank now performs the
            # exchange, and this rank repeats it.
            return self._exchange(work, layout)
        return CallFailure.of(outcome, calls=(), algorithms=())

    def _fail(self, work: StagedWork, outcome: CallOutcome) -> None:
        """Fails a call and drops its remaining chunks; if the channel is broken, also fails all later calls."""
        with self._arrived:
            if self._works and self._works[0] is work:
                self._works.popleft()
        self._end(work, outcome)
        if self.inner.failure() != OutcomeCode.OK:
            self._break(outcome)

    def _break(self, failure: CallOutcome) -> None:
        with self._arrived:
            if self._failure is None:
                self._failure = failure

    def _give_up(self, error: Exception) -> None:
        """Breaks the channel, including on the other ranks if the inner channel supports it."""
        self._break(CallFailure(OutcomeCode.REFUSED, detail=str(error)))
        self.inner.abort()

    def _drop(self, chunks: deque[_Chunk]) -> None:
        """Drops the chunks and fails all calls with the channel's failure."""
        with self._arrived:
            works = [*(chunk.work for chunk in chunks), *self._works]
            self._works.clear()
        for chunk in chunks:
            if chunk.stamp:
                _core.record_end(chunk.stamp)
        chunks.clear()
        assert self._failure is not None
        for work in works:
            if not work.is_enqueued():
                self._end(work, self._failure)

    def _end(self, work: StagedWork, outcome: CallOutcome) -> None:
        """Fails a call. Copies of its earlier chunks may still write to its tensors, which the program may reuse."""
        work.recorded.end(outcome.code)
        copied = None
        if work.issued:
            with contextlib.suppress(RuntimeError):  # after a device error, no copies are in progress
                copied = self._to_device.record()
        if copied is None:
            work.layout = None
        else:
            self._unfinished.append((work, copied))
        work.end(outcome, copied)

    def _retire(self) -> None:
        """Releases the tensors of calls that the device has completed."""
        while self._unfinished and self._unfinished[0][1].done():
            work, _ = self._unfinished.popleft()
            work.recorded.end(OutcomeCode.OK)
            work.layout = None
            _core.announce_completion()

    def _slot(self, slot: int) -> torch.Tensor:
        if self._memory is None:
            is_shared = isinstance(self.inner, _core.HostGroup)
            self._memory = PinnedMemory(SLOTS * SLOT_BYTES, self._device, is_shared)
        return self._memory.bytes[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]

    def _close_memory(self) -> None:
        try:
            self._to_host.synchronize()
            self._to_device.synchronize()
        except RuntimeError:  # after a device error, device memory cannot be released
            return
        self._retire()
        if self._memory is not None:
            self._memory.close()


def _mismatch(headers: Sequence[Sequence[int]]) -> CallFailure:
    calls = [(row[0], row[1], row[2], row[3], row[4], row[5]) for row in headers]
    return CallFailure(OutcomeCode.MISMATCH, calls=calls, algorithms=[0] * len(calls))


_announced = False  # whether this process has printed the notice about staging


class StagedGroup(OpenGroup):
    """A group on a device. `inner`, the same ranks' group for CPU tensors, is closed by this group."""

    channel: StagedChannel
    messages: StagedMessages

    def __init__(
        self, inner: OpenGroup, device: torch.device, members: Sequence[RankIdentity], group_rank: int
    ) -> None:
        device, recorder = with_index(device), GroupRecorder(members, group_rank)
        self.inner = inner
        channel = StagedChannel(inner.channel, device, recorder, group_rank, len(members))
        super().__init__(channel, StagedMessages(inner.messages, device, recorder, group_rank), [inner])

    def abort(self) -> None:
        """Aborts calls and messages, including those on the other ranks if the inner group supports it."""
        super().abort()
        self.messages.close(CallFailure(OutcomeCode.ABORTED))

    def close(self) -> None:
        """Closes the group after its enqueued copies are complete; idempotent."""
        self.inner.close()
        self.channel.close()
        self.messages.close(CallFailure(OutcomeCode.INTERRUPTED))


def announce_once(device: torch.device, backend: str, rank: int) -> None:
    """Prints a notice, once per process and only on rank 0, that device tensors are staged through host memory."""
    global _announced
    if _announced or rank != 0:
        return
    _announced = True
    faster = "; backend='nccl' is faster where NCCL works" if device.type == "cuda" else ""
    sys.stderr.write(
        f"paceline: with the backend {backend!r}, tensors on {device} are copied through host memory{faster}\n"
    )
