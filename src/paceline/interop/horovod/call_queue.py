"""Asynchronous handles, and the queue that executes a process set's calls in the same order on all ranks.

Before each call the ranks exchange a small header. Mismatched calls, including calls whose tensors have different
shapes, therefore raise an error on every rank without affecting later calls, and ranks that are waiting in `join` can
contribute zeros. Asynchronous calls run on the process set's own thread. A synchronous call runs on the calling thread
if no other call is in progress.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import torch

from paceline.comm.engine.channel import DTYPE_CODES, DTYPES, ReduceOp
from paceline.comm.group.collectives.coalesced import all_reduce_coalesced
from paceline.comm.group.collectives.collectives import all_gather_into_tensor
from paceline.comm.group.collectives.object_collectives import all_gather_object
from paceline.comm.group.process_group import ProcessGroup
from paceline.durations import to_seconds
from paceline.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError

Result = TypeVar("Result")
_END_S = 5.0  # time for which `close` waits for the thread after aborting its call


class CallKind(IntEnum):
    """The kind of a call, which must match across ranks."""

    ALLREDUCE = 0
    SPARSE_ALLREDUCE = 1
    ALLGATHER = 2
    BROADCAST = 3
    ALLTOALL = 4
    REDUCESCATTER = 5
    OBJECTS = 6
    BARRIER = 7
    JOIN = 8


def require_tensors(tensors: Iterable[object], call: str) -> None:
    """Raises TypeError unless all arguments in `tensors` are tensors. `call` is the function's name in the message."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{call} got an object of type {type(tensor).__name__}; convert it to a tensor: torch.as_tensor(...)"
            )


_ROWS_MAY_DIFFER = (CallKind.SPARSE_ALLREDUCE, CallKind.ALLGATHER, CallKind.ALLTOALL)


@dataclass
class CallRequest(Generic[Result]):
    """One rank's request for a collective call. The tensors' dtypes and shapes must match across ranks.

    Args:
        run: A function that executes the call on a group, once all ranks are ready, and returns the result.
        details: The arguments, other than the tensors and `name`, that must match across ranks.
        op: The reduction, for an all-reduce.
    """

    kind: CallKind
    tensors: Sequence[torch.Tensor]
    run: Callable[[ProcessGroup], Result]
    details: str = ""
    name: str | None = None
    op: ReduceOp = ReduceOp.SUM
    future: Future[Result] = field(default_factory=Future)
    number: int = 0  # sequence number in the process set; 0 for barriers, which may overtake other calls
    is_awaited: bool = False  # whether the program is waiting for the call

    def __post_init__(self) -> None:
        # The current CUDA stream is specific to each thread, and the call must use the stream of the program's thread.
        tensor = next((tensor for tensor in self.tensors if tensor.is_cuda), None)
        self.stream: AbstractContextManager[object] = nullcontext()
        if tensor is not None:
            self.stream = torch.cuda.stream(torch.cuda.current_stream(tensor.device))

    @property
    def text(self) -> str:
        """Human-readable text that contains all properties of the call that must match across ranks."""
        rows = ["any"] if self.kind in _ROWS_MAY_DIFFER else []
        parts = [
            f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join([*rows, *map(str, tensor.shape[len(rows) :])])}]"
            for tensor in self.tensors
        ]
        parts += [self.details, "" if self.name is None else f"name={self.name!r}"]
        return f"{self.kind.name.lower()}({', '.join(part for part in parts if part)})"


@dataclass(frozen=True)
class _Header:
    """The header that a rank sends before a call.

    Attributes:
        digest: The digest of the request's `text`.
        count: The number of tensors.
        is_awaited: Whether the rank's program is waiting for this call or a later one and therefore cannot start
            others.
        since: The number of header exchanges before the rank called `join`.
        time_ns: The time of the call to `join`. Together with `since`, it determines which rank joined last.
    """

    kind: int
    digest: int = 0
    count: int = 0
    is_awaited: int = 0
    since: int = 0
    time_ns: int = 0

    @property
    def call(self) -> tuple[int, int, int]:
        return self.kind, self.digest, self.count

    def words(self) -> list[int]:
        return [*self.call, self.is_awaited, self.since, self.time_ns]


class _Verdict(Enum):
    """The result of comparing the calls of all ranks except those that are waiting in `join`."""

    AGREED = "all ranks make the same call"
    BARRIER_FIRST = "some ranks wait in a barrier, and a barrier of the others may still overtake their calls"
    DIFFERENT = "the calls differ"
    ALL_JOINED = "all ranks wait in join"


def _verdict(headers: Sequence[_Header]) -> _Verdict:
    callers = [header for header in headers if header.kind != CallKind.JOIN]
    if not callers:
        return _Verdict.ALL_JOINED
    if len({header.call for header in callers}) == 1:
        return _Verdict.AGREED
    others = [header for header in callers if header.kind != CallKind.BARRIER]
    may_follow = len(others) < len(callers) and not any(header.is_awaited for header in others)
    return _Verdict.BARRIER_FIRST if may_follow else _Verdict.DIFFERENT


class CallQueue:
    """Executes this rank's calls on one process set.

    Only this queue may use `group`, which contains the set's ranks. `close` does not destroy the group.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._condition = threading.Condition()  # `Condition` uses a reentrant lock by default
        self._waiting: deque[CallRequest[Any]] = deque()
        self._barriers: deque[CallRequest[Any]] = deque()
        self._is_busy = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._submitted = 0
        self._exchanges = 0
        self._named: dict[tuple[CallKind, str], int] = {}

    def submit(self, request: CallRequest[Result]) -> CallRequest[Result]:
        """Queues a call for execution on the queue's thread; returns `request` immediately.

        Raises a ValueError if a call of the same kind and name is pending. A call remains pending until the program has
        waited for it or for a later call.
        """
        with self._condition:
            self._enter(request)
            self._append(request, self._waiting)
        return request

    def perform(self, request: CallRequest[Result]) -> Result:
        """Executes a call after all queued calls and returns its result; raises the same errors as `submit`."""
        request.is_awaited = True
        with self._condition:
            self._enter(request)
            is_next = self._take_turn(request, self._waiting)
        if is_next:
            self._execute(request)
        return self.result(request)

    def barrier(self) -> None:
        """Waits until all ranks have called `barrier` or `join`. Does not wait for asynchronous calls in progress."""
        request: CallRequest[None] = CallRequest(CallKind.BARRIER, [], lambda group: None)
        with self._condition:
            self._require_open()
            is_next = self._take_turn(request, self._barriers)
        if is_next:
            self._execute(request)
        self.result(request)

    def result(self, request: CallRequest[Result]) -> Result:
        """Waits for a call; returns its result or raises its error."""
        if not request.future.done():
            with self._condition:
                request.is_awaited = True
                self._condition.notify_all()
        try:
            return request.future.result()
        finally:
            self.observe(request)

    def observe(self, request: CallRequest[Result]) -> None:
        """Permits reuse of the names of a completed call and of all earlier calls."""
        if request.future.done():
            with self._condition:
                self._named = {key: number for key, number in self._named.items() if number > request.number}

    def join(self, device: int) -> int:
        """Contributes zeros to other ranks' all-reduces until all ranks have joined; returns the rank that joined last.

        Args:
            device: The index of the CUDA device on which to allocate zeros for reductions of CUDA tensors. If negative,
                the current device of the calling thread is used, as in the rank's earlier calls.
        """
        if device < 0 and torch.cuda.is_initialized():
            device = torch.cuda.current_device()  # set here, because another thread may execute the call
        return self.perform(CallRequest(CallKind.JOIN, [], lambda group: self._join(group, device)))

    def close(self) -> None:
        """Stops the thread and fails all queued calls. Idempotent."""
        with self._condition:
            self._is_closed = True
            left = [*self._barriers, *self._waiting]
            self._waiting.clear()
            self._barriers.clear()
            is_busy = self._is_busy
            self._condition.notify_all()
        for request in left:
            request.future.set_exception(CollectiveError(f"{self.group}: {request.text}: shutdown() canceled it"))
        if self._thread is not None:
            if is_busy:
                self.group.abort()
            self._thread.join(_END_S)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError(f"{self.group}: the process set has ended; call init() or add_process_set() again")

    def _enter(self, request: CallRequest[Result]) -> None:
        self._require_open()
        if request.name is not None:
            key = (request.kind, request.name)
            if key in self._named:
                raise ValueError(
                    f"{self.group}: {request.text} has the name of an earlier call that has not been synchronized; "
                    "synchronize its handle first, or give each call a different name"
                )
            self._named[key] = self._submitted + 1
        self._submitted += 1
        request.number = self._submitted

    def _take_turn(self, request: CallRequest[Result], queue: deque[CallRequest[Any]]) -> bool:
        """Reserves the queue and returns True, or queues the call and returns False if another is running or queued."""
        if self._is_busy or self._waiting or self._barriers:
            self._append(request, queue)
            return False
        self._is_busy = True
        return True

    def _append(self, request: CallRequest[Result], to: deque[CallRequest[Any]]) -> None:
        to.append(request)
        if self._thread is None:
            self._thread = threading.Thread(target=self._make_calls, name="paceline-horovod", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _make_calls(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._is_closed or (bool(self._barriers or self._waiting) and not self._is_busy)
                )
                if self._is_closed:
                    return
                request = (self._barriers or self._waiting).popleft()
                self._is_busy = True
            self._execute(request)
            del request

    def _execute(self, request: CallRequest[Result]) -> None:
        self._make(request)
        with self._condition:
            self._is_busy = False
            self._condition.notify_all()

    def _make(self, request: CallRequest[Result]) -> None:
        try:
            with request.stream:
                if request.kind is not CallKind.JOIN:
                    self._agree(request)
                request.future.set_result(request.run(self.group))
        except CollectiveError as error:
            error.args = (f"{error} (This rank called {request.text}.)",)
            request.future.set_exception(error)
        except BaseException as error:
            request.future.set_exception(error)

    def _agree(self, request: CallRequest[Result]) -> None:
        """Waits until every rank is ready for the same call; sends ranks in `join` the shapes that they contribute."""
        digest = int.from_bytes(blake2b(request.text.encode(), digest_size=7).digest(), "big")
        while True:
            is_awaited = self._is_awaited(request)
            headers = self._exchange(_Header(request.kind, digest, len(request.tensors), is_awaited))
            match _verdict(headers):
                case _Verdict.AGREED:
                    break
                case _Verdict.BARRIER_FIRST:
                    if request.kind is not CallKind.BARRIER:
                        self._make_barrier_before(request)
                case _:
                    raise self._mismatch(request.text)
        joined = [rank for rank, header in zip(self.group.ranks, headers, strict=True) if header.kind == CallKind.JOIN]
        if not joined or request.kind is CallKind.BARRIER:
            return
        if request.kind is not CallKind.ALLREDUCE:
            raise CollectiveMismatchError(
                f"{self.group}: ranks {joined} wait in join(), where a rank only participates in all-reduces of dense "
                "tensors; make this call before any rank joins"
            )
        layout = [[DTYPE_CODES[tensor.dtype], tensor.numel(), request.op, tensor.is_cuda] for tensor in request.tensors]
        self._gather(torch.tensor(layout, dtype=torch.int64, device="cpu"))

    def _is_awaited(self, request: CallRequest[Result]) -> bool:
        with self._condition:
            return request.is_awaited or any(waiting.is_awaited for waiting in self._waiting)

    def _make_barrier_before(self, request: CallRequest[Result]) -> None:
        """Executes the barrier that other ranks wait for, unless this rank's program is waiting for `request`."""
        limit_s = to_seconds(self.group.timeout)
        with self._condition:
            is_decided = self._condition.wait_for(
                lambda: self._is_closed or bool(self._barriers) or self._is_awaited(request), limit_s
            )
            barrier = self._barriers.popleft() if self._barriers else None
        if not is_decided:
            raise CollectiveTimeoutError(
                f"{self.group}: other ranks wait in barrier(), which this rank has not called within {limit_s:g} s"
            )
        if self._is_closed:
            raise CollectiveError(f"{self.group}: shutdown() canceled the call")
        if barrier is not None:
            self._make(barrier)

    def _join(self, group: ProcessGroup, device: int) -> int:
        mine = _Header(CallKind.JOIN, since=self._exchanges, time_ns=time.time_ns())
        while True:
            headers = self._exchange(mine)
            match _verdict(headers):
                case _Verdict.ALL_JOINED:
                    last = max(range(len(headers)), key=lambda rank: (headers[rank].since, headers[rank].time_ns))
                    return group.ranks[last]
                case _Verdict.DIFFERENT:
                    self._mismatch("join()")
                case _Verdict.AGREED:
                    caller = next(header for header in headers if header.kind != CallKind.JOIN)
                    if caller.kind == CallKind.ALLREDUCE:
                        self._contribute_zeros(caller.count, device)

    def _contribute_zeros(self, count: int, device: int) -> None:
        layouts = self._gather(torch.full((count, 4), -1, dtype=torch.int64, device="cpu"))
        layout = next(layout for layout in layouts if not (layout < 0).any())
        zeros = [
            torch.zeros(numel, dtype=DTYPES[code], device=f"cuda:{max(device, 0)}" if is_cuda else "cpu")
            for code, numel, _, is_cuda in layout.tolist()
        ]
        all_reduce_coalesced(zeros, ReduceOp(int(layout[0, 2])) if count else ReduceOp.SUM, self.group)

    def _exchange(self, mine: _Header) -> list[_Header]:
        self._exchanges += 1
        if self.group.size() == 1:
            return [mine]
        return [_Header(*words) for words in self._gather(torch.tensor(mine.words(), device="cpu")).tolist()]

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        gathered = mine.new_empty((self.group.size(), *mine.shape))
        all_gather_into_tensor(gathered, mine, self.group)
        return gathered

    def _mismatch(self, mine: str) -> CollectiveMismatchError:
        """Gathers the ranks' calls and returns the error that lists them. All ranks in the set must call this."""
        texts: list[Any] = [None] * self.group.size()
        all_gather_object(texts, mine, self.group)
        callers: dict[str, list[int]] = {}
        for rank, text in zip(self.group.ranks, texts, strict=True):
            callers.setdefault(text, []).append(rank)
        calls = "; ".join(f"ranks {ranks} called {text}" for text, ranks in callers.items())
        return CollectiveMismatchError(
            f"{self.group}: the ranks' calls do not match: {calls}. All ranks make the same calls in the same order, "
            "with the same names, types and shapes. Nothing was exchanged, and later calls work"
        )


class CallHandle(Generic[Result]):
    """The handle of an asynchronous call, to be passed to `poll` or `synchronize`. Creating it submits the call."""

    def __init__(self, queue: CallQueue, request: CallRequest[Result]) -> None:
        self._queue = queue
        self._request = queue.submit(request)

    def is_completed(self) -> bool:
        """Returns True if the call has succeeded or failed."""
        self._queue.observe(self._request)
        return self._request.future.done()

    def result(self) -> Result:
        """Waits for the call and returns its result. May be called repeatedly."""
        return self._queue.result(self._request)


def poll(handle: CallHandle[Result]) -> bool:
    """Returns True if the call has completed, in which case `synchronize` returns without waiting."""
    return handle.is_completed()


def synchronize(handle: CallHandle[Result]) -> Result:
    """Waits for an asynchronous call, and returns its result.

    Raises:
        PeerLostError, CollectiveError: the call failed.
    """
    return handle.result()
