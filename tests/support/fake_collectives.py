"""`fccl`: a PyTorch process group for the fake device, the counterpart of NCCL for CUDA.

Its collectives run over gloo, on one stream per group and device, after the work in the current stream. A work's `wait`
makes the current stream wait, not the host. Messages between two ranks use a stream for each pair and direction.
`register` registers the backend with torch.distributed, which also makes it available to Paceline. `COLLECTIVES` counts
this process's calls.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import fake_device
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

NAME = "fccl"
COLLECTIVES: Counter[str] = Counter()
_POLLING_S = 0.0002


def register() -> None:
    """Loads the device, and registers "fccl" with torch.distributed as its backend."""
    fake_device.load()
    if NAME.upper() not in c10d.Backend._plugins:
        c10d.Backend.register_backend(NAME, FakeDeviceGroup, devices=["fake"])


def _gloo(store: dist.Store, rank: int, size: int) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(minutes=10)
    return c10d.ProcessGroupGloo(store, rank, size, options)


class StreamWork(dist.Work):
    """A call that runs on a stream of the device."""

    def __init__(self, group: FakeDeviceGroup, device: torch.device, results: list[torch.Tensor], stream: Any) -> None:
        super().__init__()
        self._group = group
        self._results = results
        self._event = torch.Event(device)
        self._event.record(stream)
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[device])
        with torch.fake.stream(stream):
            self._future.set_result(results)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._event.wait(torch.fake.current_stream(self._event.device))
        _kept.discard(self)
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return self._event.query()

    def is_success(self) -> bool:
        return self._event.query() and self._group.failure is None

    def exception(self) -> BaseException | None:
        return self._group.failure

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        _kept.discard(self)
        return self._future

    def boxed(self) -> Any:
        _kept.add(self)  # PyTorch alone would not keep this Python object alive
        return super().boxed()


_kept: set[StreamWork] = set()


class _Lane:
    """A gloo group and the stream on which its calls run in order."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        with torch.fake.device(device):
            self.stream = torch.fake.Stream(device)


class FakeDeviceGroup(dist.ProcessGroup):
    """A process group for tensors on the fake device, and for CPU tensors, which are passed to gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._rank = rank
        self._size = size
        self._host: Any = None
        self._lanes: dict[tuple[torch.device, tuple[int, int] | None], _Lane] = {}
        self._aborted = threading.Event()
        self.failure: BaseException | None = None

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def get_error(self) -> SimpleNamespace:
        return SimpleNamespace(name="SUCCESS" if self.failure is None else "REMOTE_ERROR")

    def abort(self) -> None:
        self._aborted.set()
        for lane in self._lanes.values():
            with contextlib.suppress(RuntimeError):
                lane.group.abort()

    def shutdown(self) -> None:
        """Waits for the calls on the group's streams."""
        for lane in self._lanes.values():
            lane.stream.synchronize()

    def _lane(self, device: torch.device, between: tuple[int, int] | None = None) -> _Lane:
        name = (device, between)
        if name not in self._lanes:
            # Keys in the store contain the lane's number, not the device's, because ranks may use different devices.
            number = sum(each[1] == between for each in self._lanes)
            if between is None:
                group = _gloo(dist.PrefixStore(f"all/{number}", self._store), self._rank, self._size)
                self._lanes[name] = _Lane(group, device)
            else:  # both directions at once, since the other rank may start with the opposite one
                for pair in (tuple(sorted(between)), tuple(sorted(between, reverse=True))):
                    store = dist.PrefixStore(f"{pair[0]}-{pair[1]}/{number}", self._store)
                    self._lanes[device, pair] = _Lane(_gloo(store, pair.index(self._rank), 2), device)
        return self._lanes[name]

    def _call(
        self,
        name: str,
        arguments: Sequence[Any],
        results: Sequence[Any],
        between: tuple[int, int] | None = None,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> dist.Work:
        """Runs the call in gloo: immediately for CPU tensors, otherwise in stream order."""
        tensors = _tensors(arguments)
        devices = {tensor.device for tensor in tensors if tensor.device.type == "fake"}
        if tensors and not devices:
            if self._host is None:
                self._host = _gloo(dist.PrefixStore("cpu", self._store), self._rank, self._size)
            return getattr(self._host, name)(*arguments)
        COLLECTIVES[name] += 1
        device = devices.pop() if devices else torch.device("fake", torch.fake.current_device())
        if devices:
            raise ValueError(f"{name}: the tensors are on {device} and {devices}")
        lane = self._lane(device, between)
        on_host = [_map(argument, torch.fake.host_alias) for argument in arguments]

        def run() -> None:
            try:
                if before is not None:
                    before()
                self._finish(name, call(*on_host))
                if after is not None:
                    after()
            except BaseException as error:  # stored for the group, like a communicator's error
                self.failure = self.failure or error

        call = getattr(lane.group, name)
        if name == "_reduce_scatter_base":  # gloo's call also runs an all_reduce, but completes only in `wait`
            call = lane.group.allreduce
            output, given, options = on_host
            sums = [torch.empty_like(given)]
            on_host = [sums, dist.AllreduceOptions()]
            on_host[1].reduceOp = options.reduceOp
            before = functools.partial(sums[0].copy_, given)
            after = _in_turn(lambda: output.copy_(sums[0].chunk(self._size)[self._rank]), after)
        lane.stream.wait_stream(torch.fake.current_stream(device))
        torch.fake.launch(run, lane.stream)
        return StreamWork(self, device, _tensors(results), lane.stream)

    def _finish(self, name: str, work: Any) -> None:
        """Waits for gloo's work or for an abort, which gloo's work does not detect."""
        over = work.is_completed
        if name in ("send", "recv"):  # messages complete only in `wait`
            waiting = threading.Thread(target=work.wait, daemon=True)
            waiting.start()
            over = lambda: not waiting.is_alive()  # noqa: E731
        while not over():
            if self._aborted.wait(_POLLING_S):
                raise RuntimeError("the communicator was aborted")
        if name not in ("send", "recv"):
            work.wait()

    def _reducing(self, options: Any, results: Sequence[Any]) -> Callable[[], object] | None:
        """Replaces a mean, which gloo does not implement, with a sum; returns a function that divides the sum."""
        if options.reduceOp != dist.ReduceOp.AVG:
            return None
        options.reduceOp = dist.ReduceOp.SUM
        hosts = [torch.fake.host_alias(tensor) for tensor in _tensors(results)]
        return lambda: [host.div_(self._size) for host in hosts]

    def allreduce(self, tensors, opts=None):
        opts = opts or dist.AllreduceOptions()
        return self._call("allreduce", (tensors, opts), tensors, after=self._reducing(opts, tensors))

    def allreduce_coalesced(self, tensors, opts=None):
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._call("allreduce_coalesced", (tensors, opts), tensors, after=self._reducing(opts, tensors))

    def broadcast(self, tensors, opts=None):
        return self._call("broadcast", (tensors, opts or dist.BroadcastOptions()), tensors)

    def reduce(self, tensors, opts=None):
        opts = opts or dist.ReduceOptions()
        return self._call("reduce", (tensors, opts), tensors, after=self._reducing(opts, tensors))

    def allgather(self, outputs, inputs, opts=None):
        return self._call("allgather", (outputs, inputs, opts or dist.AllgatherOptions()), outputs)

    def _allgather_base(self, output, given, opts=None):
        return self._call("_allgather_base", (output, given, opts or dist.AllgatherOptions()), [output])

    all_gather_single = _allgather_base

    def gather(self, outputs, inputs, opts=None):
        return self._call("gather", (outputs, inputs, opts or dist.GatherOptions()), outputs)

    def scatter(self, outputs, inputs, opts=None):
        return self._call("scatter", (outputs, inputs, opts or dist.ScatterOptions()), outputs)

    def _reduce_scatter_base(self, output, given, opts=None):
        opts = opts or dist.ReduceScatterOptions()
        return self._call("_reduce_scatter_base", (output, given, opts), [output], after=self._reducing(opts, [output]))

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(self, output, given, received, sent, opts=None):
        return self._call("alltoall_base", (output, given, received, sent, opts or dist.AllToAllOptions()), [output])

    def send(self, tensors, to, tag):
        return self._call("send", (tensors, 1, tag), [], (self._rank, to))

    def recv(self, tensors, source, tag):
        return self._call("recv", (tensors, 0, tag), tensors, (source, self._rank))

    def barrier(self, opts=None):
        return self._call("barrier", (dist.BarrierOptions(),), [])


def _in_turn(first: Callable[[], object], second: Callable[[], object] | None) -> Callable[[], object]:
    return lambda: (first(), second() if second is not None else None)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value) if value.device.type == "fake" else value
    return [_map(each, change) for each in value] if isinstance(value, (list, tuple)) else value
