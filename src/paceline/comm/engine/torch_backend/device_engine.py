"""The engine for tensors on accelerators, with a separate group for each device.

The engine uses `nccl` for CUDA and ROCm, and process groups from PyTorch or an extension for other accelerators.

NCCL does not support tags, and runs a process group's calls in order, so two ranks that both send first would deadlock.
Therefore each direction between two ranks uses a separate call stream. The first message opens the stream on a separate
thread, because the other rank may be late; later messages are enqueued on the stream immediately. Messages in one
direction are received in the order in which they are sent, regardless of their tags. The two ranks compare the order of
their tags through the store.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch.distributed import distributed_c10d as c10d

from paceline.comm.engine.adapters.device_streams import AcceleratorEvent, is_capturing, record_current, with_index
from paceline.comm.engine.adapters.group_recorder import GroupRecorder, HasRecorder, RecordedWork
from paceline.comm.engine.adapters.library_engine import announce_death, announce_leave
from paceline.comm.engine.api import EngineContext, OpenGroup
from paceline.comm.engine.channel import (
    CallFailure,
    CollectiveCall,
    EngineChannel,
    HeaderFields,
    Pieces,
    ReduceOp,
    code_of,
    dtype_name,
)
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.torch_backend import process_groups
from paceline.comm.engine.torch_backend.collectives import (
    CallSettings,
    StartedCall,
    TorchGroup,
    TorchReduction,
    find_reduction,
    is_empty,
    start_call,
)
from paceline.comm.engine.torch_backend.device_calls import (
    CallStream,
    CallWatch,
    ConstructGroup,
    DeviceWork,
    StartCall,
    StreamRanks,
    StreamSettings,
)
from paceline.comm.schedule.steps import Operation
from paceline.comm.store.store import PrefixStore
from paceline.durations import event_timeout_s

OpenCallStream = Callable[[Sequence[int], str, StartCall], CallStream]
"""A function that creates a call stream, given its group ranks, its name in the store, and its first call."""

_REDUCING = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)


def connect_all(group: TorchGroup, device: torch.device) -> StartedCall:
    """Starts a call that connects all ranks in a process group."""
    return StartedCall(group.allreduce([torch.zeros(1, device=device)], c10d.AllreduceOptions()))


def connect_pair(group: TorchGroup, device: torch.device, sends: bool) -> StartedCall:
    """Starts a message that connects the sender (rank 0) and the receiver."""
    with contextlib.suppress(AttributeError, RuntimeError):  # prevents NCCL from creating a communicator for messages
        group.eager_connect_single_device(device)
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    return StartedCall(group.send([byte], 1, 0) if sends else group.recv([byte], 0, 0))


class DeviceChannel(HasRecorder, EngineChannel):
    """Enqueues one group's calls on a stream; see `engine.channel.EngineChannel`.

    A call returns as soon as the library has accepted it, and the program's current stream waits for the results. The
    watch aborts calls that cannot complete, and the next call reports the failure.

    Args:
        library: the library's name and version, for error messages.
        has_float8: whether the library and the device reduce 8-bit floats.
    """

    def __init__(
        self, calls: CallStream, watch: CallWatch, rank: int, library: str, has_float8: bool, recorder: GroupRecorder
    ) -> None:
        self._calls = calls
        self._watch = watch
        self._rank = rank
        self._library = library
        self._has_float8 = has_float8
        self._recorder = recorder
        self._settings: dict[tuple[int, int] | None, CallSettings] = {}  # by dtype and reduction, if the call reduces

    def run(self, call: CollectiveCall) -> CallFailure | None:
        """Runs a call. The current stream waits for the call; for a barrier, the thread also waits."""
        work = self.submit(call)
        if call.operation == Operation.BARRIER:
            while not work.finish(call.timeout_ns):
                pass  # the watch enforces the timeout of a barrier
        work.order_program()
        return work.outcome()

    def submit(self, call: CollectiveCall) -> DeviceWork:
        """Enqueues a call after the earlier ones.

        Raises:
            TypeError: the library does not support the reduction for this dtype.
            RuntimeError: the call is the group's first one, and a graph capture is in progress.
        """
        device = self._calls.stream.device
        settings = self._settings_of(call)
        header = (0, call.operation, call.dtype, call.reduce_op, call.root, call.count)

        def start(group: TorchGroup) -> StartedCall:
            if call.operation == Operation.BARRIER:
                return connect_all(group, device)
            return StartedCall(None) if is_empty(call) else start_call(group, call, settings)

        work = self._calls.enqueue(start, header, call.timeout_ns, self._recorder.call(call, is_async=True))
        self._watch.wake()
        return work

    def abort(self) -> None:
        """Aborts the calls on this rank."""
        self._calls.abort()

    def failure(self) -> int:
        """Returns the `OutcomeCode` for a failure of the call stream, or OK."""
        return code_of(self._calls.failure)

    def close(self) -> None:
        """Rejects further calls; the group closes the call stream. Idempotent."""
        self._calls.leave()

    def _settings_of(self, call: CollectiveCall) -> CallSettings:
        key = (call.dtype, call.reduce_op) if call.operation in _REDUCING else None
        settings = self._settings.get(key)
        if settings is None:
            reduction = None if key is None else self._reduction(call)
            settings = self._settings[key] = CallSettings(self._rank, self._calls.stream.device, reduction=reduction)
        return settings

    def _reduction(self, call: CollectiveCall) -> TorchReduction:
        # An average over one rank equals a sum, which NCCL also supports for 8-bit floats.
        is_sum = call.reduce_op == ReduceOp.AVG and self._calls.size == 1
        reduction = find_reduction(call.dtype, ReduceOp.SUM if is_sum else call.reduce_op, self._has_float8)
        if reduction is None:
            raise TypeError(
                f"{call.operation}: {self._library} has no {ReduceOp(call.reduce_op).name} of "
                f"torch.{dtype_name(call.dtype)} on {self._calls.stream.device}; convert the tensor (to int32 or "
                "float32), or reduce tensor.cpu()"
            )
        return reduction


class DeviceMessage:
    """A send or a receive, which is enqueued on the stream once its `MessageLane` is open."""

    def __init__(self, source: int) -> None:
        self._source = source
        self._enqueued = threading.Event()
        self._work: DeviceWork | None = None

    def mark_enqueued(self, work: DeviceWork) -> None:
        """Marks the message as enqueued on its call stream, or as failed."""
        self._work = work
        self._enqueued.set()

    def done(self) -> bool:
        """Returns True if the message is complete, successfully or not."""
        return self._work is not None and self._work.done()

    def is_enqueued(self) -> bool:
        """Returns True if the message is enqueued, in which case `wait` blocks only the current stream."""
        return self._enqueued.is_set()

    def wait(self, timeout_ns: int) -> bool:
        """Waits until the two ranks have opened the lane, and then waits like `DeviceWork.wait`."""
        started_ns = time.monotonic_ns()
        if not self._enqueued.wait(event_timeout_s(timeout_ns)):
            return False
        assert self._work is not None
        return self._work.wait(timeout_ns - (time.monotonic_ns() - started_ns))

    def outcome(self) -> CallFailure | None:
        """Returns the reason why the message failed, or None if no failure has been detected so far."""
        return None if self._work is None else self._work.outcome()

    def source(self) -> int:
        """Returns the sender's group rank."""
        return self._source


class MessageLane:
    """The messages in one direction between two ranks.

    The first message opens the call stream on a separate thread, which then enqueues all messages requested in the
    meantime. Later messages are enqueued by the calling threads.
    """

    def __init__(self, calls: CallStream, watch: CallWatch) -> None:
        self.calls = calls
        self._watch = watch
        self._turn = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._opener: threading.Thread | None = None
        self._is_open = False

    def put(self, message: DeviceMessage, put: Callable[[AcceleratorEvent | None], DeviceWork]) -> None:
        """Calls `put` with the event to wait for, or None, to enqueue a message after the earlier ones.

        Raises:
            RuntimeError: the lane is not open, and the current stream is being captured into a graph.
        """
        device = self.calls.stream.device
        with self._turn:
            if self._is_open:
                message.mark_enqueued(put(None))
                self._watch.wake()
                return
            if is_capturing(device):
                raise RuntimeError(
                    "the first message between two ranks connects them, which cannot be captured into a graph: send "
                    "one such message before the capture"
                )
            after = record_current(device, timing=True)
            self._waiting.append(lambda: message.mark_enqueued(put(after)))
            if self._opener is None:
                self._opener = threading.Thread(target=self._open, name="paceline-message-lane", daemon=True)
                self._opener.start()

    def _open(self) -> None:
        while True:
            with self._turn:
                if not self._waiting:
                    self._is_open = True
                    return
                following = self._waiting.popleft()
            following()
            self._watch.wake()


class DeviceMessages(HasRecorder):
    """Messages between pairs of ranks in a group; see `engine.channel.Messages`."""

    def __init__(self, rank: int, open_call_stream: OpenCallStream, watch: CallWatch, recorder: GroupRecorder) -> None:
        self._rank = rank
        self._recorder = recorder
        self._open_call_stream = open_call_stream
        self._watch = watch
        self._lanes: dict[tuple[int, int], MessageLane] = {}
        self._opening = threading.Lock()

    def send(self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool) -> DeviceMessage:
        """Starts a send to a group rank; the send always proceeds in the background."""
        recorded = self._recorder.send(peer, tag, dtype, tensor)
        return self._pass(self._rank, peer, tag, dtype, tensor, timeout_ns, recorded)

    def receive(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool
    ) -> DeviceMessage:
        """Starts a receive from a group rank.

        Raises:
            ValueError: `peer` is -1 (any rank), which NCCL does not support.
        """
        if peer < 0:
            raise ValueError(
                "recv from any rank: NCCL can only receive from a specified rank; pass src=, or use CPU tensors"
            )
        recorded = self._recorder.receive(peer, tag, dtype, tensor)
        return self._pass(peer, self._rank, tag, dtype, tensor, timeout_ns, recorded)

    def _pass(
        self, source: int, target: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, recorded: RecordedWork
    ) -> DeviceMessage:
        lane = self._lane(source, target)
        calls, sends = lane.calls, source == self._rank
        settings = CallSettings(0 if sends else 1, calls.stream.device)
        nbytes = sum(tensor[1::2])

        def start(group: TorchGroup) -> StartedCall:
            if not nbytes:
                return StartedCall(None)
            buffer = settings.buffer([tensor])
            if sends:
                return StartedCall(group.send([buffer.copy_in().tensor()], 1, 0))
            return StartedCall(group.recv([buffer.tensor()], 0, 0), [buffer])

        # The header stores the tag in place of a root, so the error for a timeout shows that ranks used different tags.
        header: HeaderFields = (0, 0, dtype, 0, tag, nbytes)
        message = DeviceMessage(source)
        lane.put(message, lambda after: calls.enqueue(start, header, timeout_ns, recorded, after))
        return message

    def _lane(self, source: int, target: int) -> MessageLane:
        with self._opening:
            lane = self._lanes.get((source, target))
            if lane is None:
                sends = source == self._rank

                def greet(group: TorchGroup) -> StartedCall:
                    return connect_pair(group, calls.stream.device, sends)

                calls = self._open_call_stream((source, target), f"{source}-{target}", greet)
                lane = self._lanes[source, target] = MessageLane(calls, self._watch)
            return lane

    def streams(self) -> list[CallStream]:
        """Returns the call streams for all directions."""
        return [lane.calls for lane in tuple(self._lanes.values())]


_CLOSING_S = 5.0  # the time that other ranks have to shut down a process group whose calls are complete
_COLLECTIVES = "all"
_FLOAT8_SINCE = (2, 24)


def missing_piece(name: str) -> str | None:
    """Describes the first prerequisite that this machine lacks and how to fix it; returns None if there is none."""
    if name == "nccl":
        return _missing_for_nccl()
    if not process_groups.is_registered(name):
        return f"torch.distributed has no backend {name!r}; import the extension that registers it"
    for device_type in process_groups.device_types(name):
        module = getattr(torch, device_type, None)
        if module is not None and module.is_available():
            return None
    return f"torch sees no device for the backend {name!r} ({', '.join(process_groups.device_types(name)) or 'none'})"


def _missing_for_nccl() -> str | None:
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"this torch ({torch.__version__}) was built without CUDA or ROCm; install one with it (pytorch.org, Get "
            "Started), or use backend='paceline' with CPU tensors"
        )
    if not c10d.is_nccl_available():
        return f"this torch ({torch.__version__}) was built without NCCL; install one from pytorch.org"
    if torch.cuda.device_count() == 0:
        return (
            "torch sees no GPU; look at nvidia-smi, at the driver, and at CUDA_VISIBLE_DEVICES, or use "
            "backend='paceline' with CPU tensors"
        )
    return None


def start(name: str, context: EngineContext) -> DeviceEngine:
    """Starts the engine; see `engine.api.EngineModule`."""
    return DeviceEngine(name, context, functools.partial(process_groups.construct, name))


def identify(device: torch.device) -> str:
    """Returns a GPU's UUID, or "" for devices that processes can share or that have no unique identifier.

    ROCm reports one UUID for all GPUs without a serial number, so only its library can detect ranks that share a GPU.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))  # missing in some builds


@dataclass(eq=False)
class DeviceGroup(OpenGroup):
    """A group on a device.

    Attributes:
        calls: the call stream for collectives.
        end: a function that closes the group after its calls are complete.
    """

    messages: DeviceMessages
    _: KW_ONLY
    calls: CallStream
    end: Callable[[DeviceGroup], None]

    def streams(self) -> list[CallStream]:
        """Returns the call streams for collectives and messages."""
        return [self.calls, *self.messages.streams()]

    def abort(self) -> None:
        """Aborts calls and messages on this rank; see `CallStream.abort`."""
        for calls in self.streams():
            calls.abort()

    def close(self) -> None:
        """Closes the group after its calls are complete; idempotent."""
        self.end(self)


class DeviceEngine:
    """Connects the ranks' devices until `close` is called. The first call on a group connects the group's ranks.

    `name` is also the name of PyTorch's backend.
    """

    def __init__(self, name: str, context: EngineContext, construct: ConstructGroup) -> None:
        self.name = name
        announce_death(context)
        self._context = context
        self._watch = CallWatch()
        self._groups: list[DeviceGroup] = []
        self._opened: Counter[int] = Counter()
        self._is_closing = False
        library = process_groups.version_of(name)
        self._settings = StreamSettings(
            construct,
            library,
            "NCCL_DEBUG=WARN makes NCCL report more" if name == "nccl" else f"Look at the output of {library}",
            identify,
            context.store,
            lambda: self._is_closing,
        )

    @property
    def members(self) -> tuple[RankIdentity, ...]:
        """The ranks in the default group and their processes."""
        return self._context.members

    def open_group(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        identity: int = 0,
        algorithm: str | None = None,
        device: torch.device | None = None,
    ) -> DeviceGroup:
        """Opens a group; only its first call waits for the other ranks. See `engine.api.Engine`.

        Raises:
            ValueError: `algorithm` is given, although the library chooses its own.
        """
        if algorithm is not None:
            advice = ", or set NCCL_ALGO" if self.name == "nccl" else ""
            raise ValueError(f"the algorithm is {algorithm!r}, but {self.name} chooses its own; leave it out{advice}")
        members = self._context.members
        own_device = with_index(torch.device("cuda") if device is None else device)
        index = self._opened[identity]  # all ranks open the groups for their devices in the same order
        self._opened[identity] += 1
        store = PrefixStore(f"{self.name}/{identity}/{index}", self._context.store)
        rank = list(ranks).index(self._context.rank)

        def open_call_stream(group_ranks: Sequence[int], name: str, greet: StartCall) -> CallStream:
            stream_ranks = StreamRanks(
                tuple(members[ranks[member]] for member in group_ranks),
                tuple(group_ranks),
                group_ranks.index(rank),
                name != _COLLECTIVES,
            )
            calls = CallStream(self._settings, own_device, PrefixStore(name, store), stream_ranks, greet)
            self._watch.add(calls)
            return calls

        def greet(group: TorchGroup) -> StartedCall:
            return connect_all(group, own_device)

        recorder = GroupRecorder([members[member] for member in ranks], rank)
        calls = open_call_stream(range(len(ranks)), _COLLECTIVES, greet)
        channel = DeviceChannel(calls, self._watch, rank, self._settings.library, has_float8(own_device), recorder)
        messages = DeviceMessages(rank, open_call_stream, self._watch, recorder)
        group = DeviceGroup(channel, messages, calls=calls, end=self._end)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Closes every group and stops the watch; idempotent."""
        self._is_closing = True
        self._end(*self._groups)
        self._watch.close()
        announce_leave(self._context)

    def _end(self, *groups: DeviceGroup) -> None:
        """Closes groups concurrently, because ranks may close their process groups in different orders."""
        groups = tuple(group for group in groups if group in self._groups)
        streams = [calls for group in groups for calls in group.streams()]
        self._groups = [group for group in self._groups if group not in groups]
        for calls in streams:
            calls.leave()
        for calls in streams:
            calls.drain()
        deadline = time.monotonic() + _CLOSING_S
        threads = [threading.Thread(target=calls.close, args=(deadline,), daemon=True) for calls in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for calls in streams:
            self._watch.remove(calls)
            calls.forget_peers()


def has_float8(device: torch.device) -> bool:
    """Returns True if the library and the device can reduce 8-bit floats (NCCL 2.24 or later, on sm90 or later)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.nccl.version()[:2] >= _FLOAT8_SINCE and torch.cuda.get_device_capability(device) >= (9, 0)
