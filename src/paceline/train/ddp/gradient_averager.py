"""GradientAverager: averages the gradients of a module over the ranks, one bucket at a time.

`SameBatches` compares the ranks' batches. `DelayedParameters` averages some parameters' gradients separately.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from paceline.comm.engine.adapters.device_streams import AcceleratorEvent, record_current
from paceline.comm.engine.channel import ReduceOp
from paceline.comm.group.compression import Wire, WireKind
from paceline.comm.group.eager import eager
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import Work
from paceline.train.autograd_graph import NO_BACKWARD, find_first_tensors, running_backward
from paceline.train.checks.check_settings import Checks
from paceline.train.checks.module_checks import ModuleChecks
from paceline.train.checks.replica_check import named_ranks
from paceline.train.ddp.comm_hook import CommHook, HookedWork
from paceline.train.ddp.gradient_buckets import (
    BucketGradients,
    GradientBuckets,
    GradientMemory,
    average_sparse,
    have_aliases,
)
from paceline.train.ddp.optimizer_in_backward import step_params, take_over_steps
from paceline.train.module_tensors import TrackedTensors, broadcast_tensors, collect_tracked
from paceline.train.training_events import RecordedBuckets

_COMPARED_STEPS = 3  # the number of steps in which batch digests are compared; a warning requires equality in all
_DIGEST_BITS = 20  # exact in float32, even when divided by the number of ranks
_MOST_BYTES = 1 << 16  # only this many leading bytes of each tensor are hashed


class GradientAverager:
    """Averages the gradients of a module over the ranks in `group`, in place.

    Reductions start strictly in bucket order, regardless of the order in which buckets become full, because collectives
    must run in the same order on every rank and autograd's order may differ between ranks. Autograd uses one thread per
    device, so the caller must serialize calls to the methods that run during a backward pass.

    Initially, buckets are filled in reverse order of registration. On an accelerator, they are rebuilt after the first
    backward pass, in the order in which rank 0 computed its gradients.

    Args:
        tracked: the module's tensors.
        bucket_caps_bytes: see `make_buckets`.
        group, checks: the process group of the ranks, and the checks for gradients and replicas.
        overlap: whether full buckets are reduced while backward continues; must be the same on every rank.
        find_unused: whether a backward pass may leave some parameters without a gradient.
        static_graph: whether the autograd graph is the same in every step. The first backward pass then determines how
            many gradients each parameter receives. Overrides `find_unused`.
        compares_batches: whether digests of the ranks' batches are averaged together with the first gradients.
        wire: the format to which gradients are rounded between hosts, with error feedback. If None, gradients are not
            rounded. Batch digests are never sent with rounded gradients.
    """

    def __init__(
        self,
        tracked: TrackedTensors,
        bucket_caps_bytes: Sequence[int],
        group: ProcessGroup,
        *,
        checks: ModuleChecks,
        overlap: bool = False,
        find_unused: bool = False,
        static_graph: bool = False,
        compares_batches: bool = True,
        wire: WireKind | None = None,
    ) -> None:
        # - Averaging of gradients
        self.gradients = GradientBuckets(tracked, bucket_caps_bytes)
        self.group = group
        self._checks = checks
        self.comm_hook: CommHook | None = None  # if set, averages buckets in place of the engine
        self.scale = 1.0  # factor that is applied to averages; differs from 1 if `join` excludes ranks from the divisor
        on_cpu = all(param.is_cpu for param in self.gradients.params)
        self._same_batches = SameBatches(group, on_cpu=compares_batches and on_cpu and wire is None)
        self._wire = wire
        # Each wire keeps the rounding errors of the gradients in a bucket, listed by name.
        self._wires: dict[int, tuple[Sequence[str], Wire]] = {}

        # - Options of the wrapper
        self._overlap = overlap
        self.static_graph = static_graph
        self._find_unused = find_unused and not static_graph
        self._is_recording = static_graph  # whether a static graph's first backward pass has yet to be recorded

        # - Gradient counts per parameter and per bucket
        self._expected_counts = [1] * len(self.gradients.params)  # the number of gradients that each parameter receives
        self._arrives = [True] * len(self.gradients.params)  # whether each parameter receives a gradient on this rank
        self._arrivals: dict[int, None] | None = {}  # parameters in the order of their last gradients; None after use
        self._count_buckets()

        # - Collectives started by the current backward pass
        self._recorded = RecordedBuckets("ddp")
        self._in_flight: list[tuple[int, Work | HookedWork, GradientMemory]] = []
        self._averaged: list[GradientMemory] = []  # memory whose averages have yet to be written back
        self._ahead: dict[int, tuple[GradientMemory, AcceleratorEvent]] = {}  # full buckets waiting for earlier ones

    @property
    def allows_unused(self) -> bool:
        """Returns True if a backward pass may leave some parameters without a gradient."""
        return self._find_unused or self.static_graph

    def make_static(self) -> None:
        """Enables `static_graph`; must be called before the first forward pass."""
        self.static_graph = self._is_recording = True
        self._find_unused = False
        self._count_buckets()

    def before_forward(self, inputs: object) -> None:
        """Processes the inputs to a forward pass whose backward pass will average gradients."""
        if not self._same_batches.is_over:
            self._same_batches.look(inputs)

    # - Methods that run during a backward pass

    def counted_params(self) -> Iterator[int]:
        """Yields the index of each parameter for which `count_and_start` must be called.

        On the CPU, these are the parameters in buckets that may start before backward ends. On an accelerator with
        overlap, all parameters are counted, because the first backward pass also records the order of gradients.
        """
        counted = len(self.gradients.buckets) if self._early and self.gradients.are_on_device else self._early
        for bucket in self.gradients.buckets[:counted]:
            yield from bucket.params

    def _count_buckets(self) -> None:
        """Computes the number of buckets that may start early and the number of parameters that each bucket waits for.

        With `find_unused`, any parameter may receive no gradient, so no bucket can start early.
        """
        buckets = self.gradients.buckets
        self._early = max(0, len(buckets) - 1) if self._overlap and not self._find_unused else 0
        self._full_counts = [sum(self._arrives[index] for index in bucket.params) for bucket in buckets]
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket.params}
        self.reset_counts()

    def reset_counts(self) -> None:
        """Resets the counts before a backward pass."""
        self._next = 0  # the first bucket whose reduction has not started
        self._counts = [0] * len(self._expected_counts)
        self._left = list(self._full_counts)  # the number of parameters that each bucket is still waiting for

    def count_and_start(self, index: int) -> bool:
        """Counts a gradient for the parameter `index`, and starts reductions of buckets that are now full.

        Returns False if the bucket's reduction had already started without this gradient.
        """
        bucket = self._bucket_of[index]
        if self._arrivals is not None:
            self._arrivals.pop(index, None)
            self._arrivals[index] = None
        self._counts[index] += 1
        if self._counts[index] == self._expected_counts[index]:
            self._left[bucket] -= 1
        elif bucket < self._next:
            return False
        else:
            self._ahead.pop(bucket, None)
        if self._left[bucket] == 0 and not self._is_recording and bucket < self._early:
            self._recorded.ready(bucket, self.gradients.buckets[bucket].nbytes)
            self.gradients.fill_absent()
            if bucket > self._next and self.gradients.are_on_several:
                self._collect_ahead(bucket)
            self._start_full()
        return True

    def _collect_ahead(self, bucket: int) -> None:
        """Collects a full bucket on the current thread's streams, because another thread will start its reduction."""
        gradients = self.gradients.active[bucket]
        memory = None if gradients is None else gradients.collect(copy_shared=True)
        if memory is not None:
            self._ahead[bucket] = memory, record_current(memory.tensors[0].device)

    def _start_full(self) -> None:
        """Starts reducing full buckets on the group's progress thread, strictly in order.

        A gradient that shares memory with other tensors is averaged in a copy, because the running backward pass may
        still read it.
        """
        while self._next < self._early and self._left[self._next] == 0:
            gradients = self.gradients.active[self._next]
            if gradients is not None:
                memory: GradientMemory | None
                if self._next in self._ahead:
                    memory, computed = self._ahead.pop(self._next)
                    computed.order()
                else:
                    memory = gradients.collect(copy_shared=True)
                if memory is None:
                    return  # a user's hook has removed a gradient; an error is raised when backward ends
                self._start(self._next, gradients, memory, async_op=True)
            self._next += 1

    # - Methods that run when backward ends

    def record_static(self) -> bool:
        """Records, in a static graph's first backward pass, the number of gradients that each parameter receives.

        Returns False if no rank has any gradient. The next backward pass is then treated as the first.
        """
        if not self._is_recording:
            return True
        anywhere = self.gradients.settle_present(self.group)
        if not any(anywhere):
            return False
        self._is_recording = False
        self._expected_counts = list(self._counts)
        self._arrives = [count > 0 and is_anywhere for count, is_anywhere in zip(self._counts, anywhere, strict=True)]
        self._count_buckets()
        return True

    def average_rest(self, copy_shared: bool, *, after_started: bool = False) -> bool:
        """Averages the gradients, and waits for all collectives; returns False if gradients are missing.

        Args:
            copy_shared: whether gradients that share memory with other tensors are averaged in copies.
            after_started: whether buckets whose reduction started early are skipped. If False, they are averaged again.
        """
        self.gradients.fill_absent()
        if self._find_unused:
            self.gradients.take_present(self.group)
        is_averaged = self._average_from(self._next if after_started else 0, copy_shared)
        if is_averaged and self._arrivals is not None:
            self._settle_order()
        return is_averaged

    def _settle_order(self) -> None:
        """Rebuilds the buckets on an accelerator after the first average; all ranks must call this method.

        With a communication hook, the buckets do not change, because the hook may keep state per bucket index.
        """
        arrivals, self._arrivals = list(self._arrivals or ()), None
        if not (self._early and self.gradients.are_on_device) or self.comm_hook is not None:
            return
        order = torch.tensor([*arrivals, *sorted(self._bucket_of.keys() - set(arrivals), reverse=True)], device="cpu")
        self.group.broadcast(order, 0)
        self.gradients.reorder(order.tolist())
        self._count_buckets()

    def average_again(self, copy_shared: bool) -> None:
        """Averages the gradients once more, after another backward pass (REPEATING in `reducer.py`).

        If gradients are missing, the average includes only gradients that at least one rank has. A rank without any
        gradient does not call a collective, because it may be the only rank that runs this backward pass, such as a
        `torch.autograd.grad` call for other tensors.
        """
        if self._find_unused or not self.gradients.are_incomplete():
            self.average_rest(copy_shared)
        elif self.gradients.any_present():
            with self.gradients.only_present(self.group):
                self._average_from(0, copy_shared)

    def _average_from(self, first: int, copy_shared: bool) -> bool:
        active = enumerate(self.gradients.active)
        rest = [(bucket, gradients) for bucket, gradients in active if bucket >= first and gradients is not None]
        memories = _collect(rest, copy_shared)
        sparse = self.gradients.active_sparse()
        if len(memories) != len(rest) or any(param.grad is None for param in sparse.values()):
            self._finish()
            self._checks.forget()
            return False
        if have_aliases(memories):
            # The gradients might not overlap on a rank with a different batch size. Copies have the same memory layout
            # on all ranks.
            memories = _collect(rest, copy_shared=True)
        if self.comm_hook is None and memories and not self._same_batches.is_over:
            self._same_batches.add_to(memories[-1], rest[-1][1].dtype)
        for (bucket, gradients), memory in zip(rest, memories, strict=True):
            self._start(bucket, gradients, memory, async_op=False)
        if sparse:
            self._checks.look_at(list(sparse), [param.grad for param in sparse.values()])
            average_sparse(sparse.values(), self.group, self.scale)
            self._checks.averaged([param.grad for param in sparse.values()])
        self._finish()
        self._checks.end()
        return True

    def _start(self, bucket: int, gradients: BucketGradients, memory: GradientMemory, async_op: bool) -> None:
        work: Work | HookedWork | None
        self._recorded.ready(bucket, self.gradients.buckets[bucket].nbytes)
        by_param = memory.tensors if memory.views is None else memory.views
        self._checks.look(gradients.names, by_param, memory.pieces, gradients.dtype_code)
        self._recorded.sent(bucket)
        if self.comm_hook is None:
            work = self.group.all_reduce_memory(
                memory.pieces,
                memory.tensors,
                gradients.dtype_code,
                memory.count,
                ReduceOp.AVG,
                async_op,
                None if self._wire is None else self._wire_of(bucket, self._wire, gradients.names),
            )
        else:
            work = self.comm_hook.start(bucket, self.gradients.is_last(bucket), gradients, memory)
        if work is None:
            self._recorded.done(bucket)
            self._averaged.append(memory)
        else:
            self._in_flight.append((bucket, work, memory))

    def _wire_of(self, bucket: int, kind: WireKind, names: Sequence[str]) -> Wire:
        """Returns the bucket's wire; a new one if its set of gradients has changed, as with unused parameters."""
        known = self._wires.get(bucket)
        if known is None or known[0] != names:
            known = self._wires[bucket] = (names, Wire(kind))
        return known[1]

    def _finish(self) -> None:
        self._ahead.clear()
        in_flight, self._in_flight = self._in_flight, []
        averaged, self._averaged = self._averaged, []
        for bucket, work, memory in in_flight:
            work.wait()
            self._recorded.done(bucket)
            averaged.append(memory)
        if not self._same_batches.is_over:
            self._same_batches.arrive()
        is_divided = self.comm_hook is not None and self.comm_hook.sets_divisor
        for memory in averaged:
            if self.scale != 1 and not is_divided:
                torch._foreach_mul_(memory.tensors, self.scale)
            memory.write_back()

    def abandon(self) -> None:
        """Discards the collectives in flight after an error, without waiting for them."""
        self._in_flight.clear()
        self._averaged.clear()
        self._ahead.clear()
        self._checks.forget()
        self._recorded.forget()
        self._same_batches.is_over = True

    def replace_by_zeros(self) -> list[torch.Tensor | None]:
        """Replaces the gradients with zeros on a rank without inputs in this step; returns the previous gradients."""
        own = self.gradients.values()
        self._checks.make_fewer_steps()
        self._counts = [1] * len(self._counts)
        self._same_batches.drop_digest()
        self.gradients.set_values([None] * len(own) if self._find_unused else self.gradients.zeros())
        return own


def _collect(buckets: Sequence[tuple[int, BucketGradients]], copy_shared: bool) -> list[GradientMemory]:
    """Returns the memory of all buckets, except those with missing gradients."""
    return [memory for _, gradients in buckets if (memory := gradients.collect(copy_shared)) is not None]


class ExternalAverager(Protocol):
    """Interface for objects outside this package that average a module's gradients, for example in an elastic job."""

    def before_forward(self) -> None:
        """Prepares a forward pass whose backward pass will average gradients."""
        ...

    def average(self) -> None:
        """Replaces the gradients with their mean over the ranks."""
        ...

    def skip(self) -> None:
        """Participates in averaging without contributing gradients."""
        ...

    def set_weight(self, weight: float) -> None:
        """Sets this rank's weight in the next mean."""
        ...


class DelegatingAverager(GradientAverager):
    """Delegates to an `ExternalAverager`, which averages the gradients when backward ends; `group` has one rank."""

    def __init__(
        self,
        tracked: TrackedTensors,
        bucket_caps_bytes: Sequence[int],
        group: ProcessGroup,
        averages: ExternalAverager,
        *,
        checks: ModuleChecks,
        find_unused: bool,
    ) -> None:
        super().__init__(tracked, bucket_caps_bytes, group, checks=checks, find_unused=find_unused)
        self._averages = averages

    def make_static(self) -> None:
        """Allows some parameters to receive no gradient, which is the only effect of a static graph in this class."""
        self._find_unused = True

    def before_forward(self, inputs: object) -> None:
        """Prepares a forward pass whose backward pass will average gradients."""
        super().before_forward(inputs)
        self._averages.before_forward()

    def average_rest(self, copy_shared: bool, *, after_started: bool = False) -> bool:
        """Averages the gradients; returns False if some are missing."""
        if not self._find_unused and self.gradients.are_incomplete():
            return False
        self._average()
        return True

    def average_again(self, copy_shared: bool) -> None:
        """Averages the gradients once more, after another backward pass (REPEATING in `reducer.py`).

        Does nothing if no parameter has a gradient, because such a backward pass computed gradients of other tensors.
        """
        if self.gradients.any_present():
            self._average()

    def _average(self) -> None:
        self._checks.look_at(self.gradients.names, self.gradients.values())
        self._averages.average()
        self._checks.end([gradient for gradient in self.gradients.values() if gradient is not None])


class SameBatches:
    """Detects ranks that read the same batches, without an additional collective.

    In the first steps, a vector with one element per rank is averaged together with the gradients. Each rank writes a
    digest of its inputs to its own element and zeros to all others, so the average contains the digests of all ranks.
    After these steps `is_over` is True. Batches on a GPU are not compared, because hashing would synchronize with the
    device.
    """

    def __init__(self, group: ProcessGroup, on_cpu: bool) -> None:
        self.is_over = group.size() == 1 or not on_cpu
        self._group = group
        self._mine: int | None = None
        self._sent: torch.Tensor | None = None
        self._seen: list[list[float]] = []

    def look(self, inputs: object) -> None:
        """Computes the digest of a forward pass's inputs."""
        self._mine = digest(inputs)

    def drop_digest(self) -> None:
        """Discards the digest on a rank that has no inputs in this step."""
        self._mine = None

    def add_to(self, memory: GradientMemory, dtype: torch.dtype) -> None:
        """Appends the digest to gradients of `dtype`, if that dtype can represent it exactly."""
        if self.is_over or dtype not in (torch.float32, torch.float64):
            return
        self._sent = torch.zeros(self._group.size(), dtype=dtype, device="cpu")
        # A rank without a digest sends a negative number that no other rank sends.
        self._sent[self._group.rank()] = -1 - self._group.rank() if self._mine is None else self._mine
        memory.pieces += (self._sent.data_ptr(), self._sent.nbytes)
        memory.tensors = [*memory.tensors, self._sent]
        memory.count += len(self._sent)

    def arrive(self) -> None:
        """Reads the digests of all ranks from the averaged vector."""
        if self._sent is None:
            return
        self._seen.append(self._sent.tolist())
        self._sent = None
        if len(self._seen) == _COMPARED_STEPS:
            self.is_over = True
            self._warn_if_equal()

    def _warn_if_equal(self) -> None:
        histories = list(zip(*self._seen, strict=True))
        me = self._group.rank()
        if min(histories[me]) < 0:
            return
        alike = [rank for rank, history in enumerate(histories) if history == histories[me]]
        if len(alike) > 1 and alike[0] == me:
            warnings.warn(
                f"{named_ranks(alike, self._group.ranks)} read the same batches: their first {_COMPARED_STEPS} "
                "batches were equal, so they compute the same gradients, and training gains nothing from the "
                "additional ranks. Give the DataLoader sampler=paceline.DistributedSampler(dataset), or use another "
                "seed for the batches on each rank",
                stacklevel=2,
            )


def digest(inputs: object) -> int | None:
    """Returns a digest of the tensors in `inputs`, or None if all are constant or any is not on the CPU."""
    hashed = hashlib.blake2b(digest_size=8)
    varies = False
    for tensor in find_first_tensors(inputs):
        if tensor is None:
            break
        if tensor.layout is not torch.strided or tensor.is_nested or not tensor.is_cpu:
            return None
        flat = tensor.detach().reshape(-1)[: _MOST_BYTES // tensor.element_size()].contiguous()
        flat = flat.resolve_conj().resolve_neg()
        data = ctypes.string_at(flat.data_ptr(), flat.nbytes)
        hashed.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        hashed.update(data)
        varies = varies or (len(flat) > 1 and data != data[: flat.element_size()] * len(flat))
    return int.from_bytes(hashed.digest(), "big") % (1 << _DIGEST_BITS) if varies else None


class DelayedParameters:
    """Averages the gradients of some parameters at the end of each backward pass that reaches `trigger`.

    Averaging takes one call per dtype, separate from the buckets of other parameters, and runs even within `no_sync`. A
    parameter without a gradient contributes zeros, as in torch (`delay_all_reduce_named_params`).
    """

    def __init__(
        self, module: nn.Module, named: Iterable[tuple[str, nn.Parameter]], trigger: nn.Parameter, group: ProcessGroup
    ) -> None:
        self.params = dict(named)
        trained = {name: param for name, param in self.params.items() if param.requires_grad}
        sparse = collect_tracked(module).sparse & set(trained)
        tracked = TrackedTensors(trained, frozen={}, buffers={}, sparse=sparse, ignored=frozenset())
        checks = ModuleChecks(module, tracked, group, Checks(are_on=False), with_buffers=False)
        self._averager = GradientAverager(tracked, [sys.maxsize], group, checks=checks, compares_batches=False)
        self._stepped = take_over_steps(trained)
        self._group = group
        self._task = NO_BACKWARD  # autograd's task id of the backward pass that reached the trigger
        self._hook = trigger.register_hook(self._begin)

    def broadcast(self) -> None:
        """Copies rank 0's parameters to all ranks."""
        broadcast_tensors(list(self.params.values()), self._group)

    def close(self) -> None:
        """Removes the hook from the trigger; idempotent."""
        self._hook.remove()

    @eager
    def _begin(self, _: torch.Tensor) -> None:
        task = running_backward()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @eager
    def _end(self) -> None:
        self._task = NO_BACKWARD
        self._averager.gradients.fill_missing()
        self._averager.average_rest(copy_shared=True)
        step_params(self._stepped)
