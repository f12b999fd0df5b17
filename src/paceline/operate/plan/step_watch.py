"""StepWatch: records a script's steps with hooks on its modules, parameters, optimizers and loaders.

During the first steps, the forward pass of every module is watched to find the outermost modules with parameters: a
`DistributedDataParallel`, or the model itself. Afterwards, only these modules are watched, and the hooks take a few
microseconds per step plus one microsecond per parameter. `calibration_of` computes the calibration from the records.
"""

from __future__ import annotations

import datetime
import os
import resource
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader

from paceline import _core
from paceline.operate.plan.calibration import (
    VERSION,
    Calibration,
    Links,
    MeasuredGradient,
    MeasuredMemory,
    MeasuredTimes,
    Origin,
)
from paceline.train.autograd_graph import find_tensors
from paceline.train.ddp.arguments import DEFAULT_BUCKET_CAP_MB
from paceline.train.ddp.bucket_assignment import MIB, caps_of
from paceline.train.ddp.distributed_data_parallel import DistributedDataParallel

LEFT_OUT = 3
"""The number of initial steps to skip, while caches and the allocator's pools are still growing."""

_BEFORE_SETTLED = 2  # number of optimizer steps during which modules are discovered and memory is allocated


@dataclass
class StepNotes:
    """The times of one training step, in seconds. A step ends with the optimizer step.

    Attributes:
        begin_s: the time at which the step began.
        end_s: the time at which the step ended.
        data_s: the time spent waiting for the loader.
        forward_s: the duration of each forward pass.
        backward_s: the duration of each backward pass.
        optimizer_s: the total duration of optimizer steps.
        ready_s: the time from the start of the last backward pass until each parameter's gradient was ready.
        samples: the number of samples passed to the forward passes.
    """

    begin_s: float
    end_s: float = 0.0
    data_s: float = 0.0
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    optimizer_s: float = 0.0
    ready_s: dict[str, float] = field(default_factory=dict)
    samples: float = 0.0

    @property
    def seconds(self) -> float:
        """The duration of the whole step."""
        return self.end_s - self.begin_s

    @property
    def rest_s(self) -> float:
        """The duration of everything that no other field covers."""
        known = self.data_s + sum(self.forward_s) + sum(self.backward_s) + self.optimizer_s
        return max(0.0, self.seconds - known)


class TooFewStepsError(RuntimeError):
    """Raised if a script runs too few steps to be measured."""


def times_of(steps: Sequence[StepNotes]) -> MeasuredTimes:
    """Returns the median duration of each part of a step.

    Raises:
        TooFewStepsError: no step has both a forward and a backward pass.
    """
    if not any(step.forward_s and step.backward_s for step in steps):
        raise TooFewStepsError(
            f"{len(steps)} optimizer steps were observed, but none included a forward and a backward pass of a module "
            "with parameters; the script must train beyond the steps that are skipped at its beginning"
        )
    forwards = [seconds for step in steps for seconds in step.forward_s]
    backwards = [seconds for step in steps for seconds in step.backward_s]
    return MeasuredTimes(
        data_s=median(step.data_s for step in steps),
        forward_s=median(forwards),
        backward_s=median(backwards),
        optimizer_s=median(step.optimizer_s for step in steps),
        rest_s=median(step.rest_s for step in steps),
    )


def forwards_of(steps: Sequence[StepNotes]) -> int:
    """Returns the median number of forward passes per step."""
    return max(1, round(median(len(step.backward_s) for step in steps)))


def ready_of(steps: Sequence[StepNotes]) -> Mapping[str, float]:
    """Returns the median time at which each gradient was ready, over the steps that computed the gradient."""
    names = dict.fromkeys(name for step in steps for name in step.ready_s)
    return {name: median(step.ready_s[name] for step in steps if name in step.ready_s) for name in names}


def samples_of(steps: Sequence[StepNotes]) -> float | None:
    """Returns the median number of samples per step, or None if no forward pass received a tensor."""
    return median(step.samples for step in steps) or None


@dataclass(frozen=True)
class CoreUsage:
    """The CPU time used so far, in seconds.

    Attributes:
        at_s: the time of the measurement.
        machine_s: the time used by all processes on the machine.
        own_s: the time used by this process.
    """

    at_s: float
    machine_s: float
    own_s: float

    @classmethod
    def now(cls) -> CoreUsage:
        """Measures the usage. Without /proc/stat, it is assumed that no other process is running."""
        own = os.times()
        own_s = own.user + own.system
        try:
            with open("/proc/stat") as file:
                user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
        except (OSError, ValueError):
            return cls(time.monotonic(), own_s, own_s)
        ticks = user + nice + system + irq + softirq
        return cls(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own_s)

    def contention(self, later: CoreUsage, ranks: int, cores: int) -> float:
        """Returns the fraction of the cores' time that other processes took from the ranks until `later`.

        Usage up to the idle time of the cores is not counted, because idle cores could have handled it without slowing
        down the ranks.

        Args:
            later: the usage at the end.
            ranks: the number of ranks that used as much time as this process.
            cores: the number of cores.
        """
        total_s = cores * (later.at_s - self.at_s)
        busy_s = later.machine_s - self.machine_s
        others_s = max(0.0, busy_s - ranks * (later.own_s - self.own_s))
        idle_s = max(0.0, total_s - busy_s)
        return min(1.0, max(0.0, others_s - idle_s) / total_s) if total_s > 0 else 0.0


class StepWatch:
    """Records the steps of this process until `close` is called.

    Args:
        after_step: a function called with this object after each recorded step.
        clock: a function that returns the time in seconds.
    """

    def __init__(self, after_step: Callable[[StepWatch], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self.began = CoreUsage.now()
        self.steps: list[StepNotes] = []
        self.roots: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._after_step = after_step
        self._clock = clock
        self._notes = StepNotes(clock())
        self._depth = 0
        self._seen = 0
        self._forward_began = self._backward_began = self._latest_ready = self._optimizer_began = 0.0
        self._in_backward = False
        self._handles: list[Any] = [
            optimizers.register_optimizer_step_pre_hook(self._before_optimizer),
            optimizers.register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self._finding: list[Any] = [
            modules.register_module_forward_pre_hook(self._enter),
            modules.register_module_forward_hook(self._leave, always_call=True),
        ]
        self._next = dataloader._BaseDataLoaderIter.__next__
        dataloader._BaseDataLoaderIter.__next__ = self._timed_next()  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        """Removes all hooks; idempotent."""
        for handle in (*self._finding, *self._handles):
            handle.remove()
        self._finding, self._handles = [], []
        dataloader._BaseDataLoaderIter.__next__ = self._next  # type: ignore[method-assign]

    # - Module discovery

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and module not in self.roots and _trains(module):
            self.roots.append(module)

    def _leave(self, *_: Any) -> None:
        self._depth -= 1

    def _settle(self) -> None:
        """Stops discovering modules and watches those found so far."""
        for handle in self._finding:
            handle.remove()
        self._finding = []
        for module in self.roots:
            self._handles += [
                module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
                module.register_forward_hook(self._after_forward),
            ]
            for name, param in module.named_parameters():
                if param.requires_grad:
                    self._handles.append(param.register_post_accumulate_grad_hook(partial(self._arrive, name)))

    # - Recording of a step

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._end_backward()
            self._forward_began = self._clock()
            first = next((tensor for tensor in find_tensors((args, kwargs)) if tensor.dim() > 0), None)
            if first is not None and module is self.roots[0]:
                self._notes.samples += first.shape[0]

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or not self._forward_began:
            return
        self._notes.forward_s.append(self._clock() - self._forward_began)
        self._forward_began = 0.0
        for tensor in find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def _begin_backward(self, _: torch.Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._backward_began = self._latest_ready = self._clock()

    def _arrive(self, name: str, param: torch.Tensor) -> None:
        self._begin_backward(param)
        self._latest_ready = self._clock()
        self._notes.ready_s[name] = self._latest_ready - self._backward_began

    def _end_backward(self) -> None:
        if self._in_backward:
            self._in_backward = False
            self._notes.backward_s.append(self._latest_ready - self._backward_began)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._end_backward()
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        self._optimizer_began = self._clock()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        now = self._clock()
        self._notes.optimizer_s += now - self._optimizer_began
        if optimizer is not self.optimizers[0]:
            return
        self._seen += 1
        if self._finding:
            if self._seen >= _BEFORE_SETTLED and self.roots:
                self._settle()
        else:
            self._notes.end_s = now
            self.steps.append(self._notes)
            self._after_step(self)
        self._notes = StepNotes(self._clock())

    def _timed_next(self) -> Callable[[Any], Any]:
        following = self._next

        def timed(loader: Any) -> Any:
            began = self._clock()
            try:
                return following(loader)
            finally:
                self._notes.data_s += self._clock() - began

        return timed


def _trains(module: nn.Module) -> bool:
    return module.training and any(param.requires_grad for param in module.parameters())


def calibration_of(watch: StepWatch, links: Links, command: Sequence[str], together: int) -> Calibration:
    """Returns the calibration of a script.

    Args:
        watch: the recorded steps of the script.
        links: the measured links.
        command: the script and its arguments.
        together: the number of ranks on this machine that ran the script at the same time.

    Raises:
        TooFewStepsError: the script ran too few steps.
    """
    steps = watch.steps[LEFT_OUT:]
    wrapped = next((root for root in watch.roots if isinstance(root, DistributedDataParallel)), None)
    caps = caps_of(DEFAULT_BUCKET_CAP_MB * MIB) if wrapped is None else wrapped._bucket_caps
    cores = _core.usable_cores()
    return Calibration(
        version=VERSION,
        origin=Origin(
            tuple(command),
            datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            socket.gethostname(),
            cores,
            torch.get_num_threads(),
            together,
            {"torch": str(torch.__version__), "paceline": metadata.version("paceline")},
            watch.began.contention(CoreUsage.now(), together, cores),
        ),
        times=times_of(steps),
        step_s=tuple(step.seconds for step in steps),
        samples=samples_of(steps),
        forwards=forwards_of(steps),
        gradients=_gradients(watch.roots, steps),
        bucket_nbytes=caps,
        overlaps=wrapped is not None and wrapped.overlap,
        buffer_nbytes=_buffer_nbytes(wrapped),
        memory=_memory(watch),
        links=links,
    )


def _gradients(roots: Sequence[nn.Module], steps: Sequence[StepNotes]) -> tuple[MeasuredGradient, ...]:
    ready = ready_of(steps)
    return tuple(
        MeasuredGradient(name, param.nbytes, str(param.dtype).removeprefix("torch."), ready[name])
        for root in roots
        for name, param in root.named_parameters()
        if name in ready
    )


def _buffer_nbytes(wrapped: DistributedDataParallel | None) -> int:
    if wrapped is None or not wrapped.forward_sync_buffers:
        return 0
    return sum(buffer.nbytes for buffer in wrapped.module.buffers())


def _memory(watch: StepWatch) -> MeasuredMemory:
    params = {id(param): param for root in watch.roots for param in root.parameters()}
    parameter_nbytes = sum(param.nbytes for param in params.values())
    gradient_nbytes = sum(param.nbytes for param in params.values() if param.requires_grad)
    optimizer_nbytes = sum(
        value.nbytes
        for optimizer in watch.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    other = max(0, peak - parameter_nbytes - gradient_nbytes - optimizer_nbytes)
    return MeasuredMemory(parameter_nbytes, gradient_nbytes, optimizer_nbytes, other)


def reduction_s_per_byte() -> float:
    """Measures the time in seconds that one core takes to reduce a byte with the engine's kernel."""
    nbytes = 1 << 20
    return _core.time_reduction(nbytes) / nbytes


def world_of_one(local_ranks: int) -> dict[str, str]:
    """Returns the environment variables with which `init_process_group` creates a world of size 1.

    LOCAL_WORLD_SIZE keeps its value, because `DistributedDataParallel` uses it to determine whether the machine has
    idle cores.
    """
    from paceline.operate.launch.workers.environment import free_port

    return {
        "RANK": "0",
        "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0"),
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": str(local_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
