"""The calls that average a module's gradients over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import ReduceOp
from paceline.group.wire import WireKind
from paceline.group.work import Work
from paceline.parallel.ddp.countdown import Countdown
from paceline.parallel.ddp.feedback import BucketWires
from paceline.parallel.ddp.gradient_buckets import GradientBuckets
from paceline.parallel.ddp.gradients import BucketGradients, Memory, have_aliases
from paceline.parallel.ddp.hook import CommHook, HookedWork
from paceline.parallel.ddp.same_batches import SameBatches
from paceline.parallel.ddp.sparse import average_sparse
from paceline.parallel.health.module_checks import ModuleChecks
from paceline.parallel.recorded import RecordedBuckets


class Averager:
    """Averages `gradients` over the ranks of `group`, in place, when the caller says so.

    Args:
        gradients: the gradients of a module.
        group: the ranks.
        compares_batches: whether digests of the ranks' batches are sent along with the first gradients.
        checks: looks at the gradients, and is told of each averaged backward.
        wire: what gradients are rounded to between hosts, with error feedback; None if they are not. Digests of batches
            would not survive it, and are not sent then.
    """

    def __init__(
        self,
        gradients: GradientBuckets,
        group: ProcessGroup,
        *,
        compares_batches: bool = True,
        checks: ModuleChecks | None = None,
        wire: WireKind | None = None,
    ) -> None:
        # - How gradients are averaged
        self._gradients = gradients
        self._group = group
        self._checks = checks
        self.comm_hook: CommHook | None = None  # the hook that averages instead of the engine
        self.scale = 1.0  # the factor of averages: within `join`, not all ranks may count
        on_cpu = all(param.is_cpu for param in gradients.params)
        self.same_batches = SameBatches(group, on_cpu=compares_batches and on_cpu and wire is None)
        self._wires = BucketWires(wire)

        # - The calls of this backward
        self._recorded = RecordedBuckets("ddp")
        self._in_flight: list[
            tuple[int, Work | HookedWork, Memory]
        ] = []  # on the group's progress thread, or with the hook
        self._over: list[Memory] = []  # averaged, but not written back yet

    def note_ready(self, at: int) -> None:
        """Records that a bucket's gradients are there, before it may be its turn."""
        self._recorded.ready(at, self._gradients.buckets[at].nbytes)

    def start_full(self, countdown: Countdown) -> None:
        """Starts the buckets that are full now, strictly in their order."""
        self._gradients.fill_absent()
        while countdown.may_start():
            if not self._start_early(countdown.next):
                return  # a hook of the user's has removed a gradient, which is an error when backward ends
            countdown.next += 1

    def _start_early(self, at: int) -> bool:
        """Averages a bucket on the group's progress thread; if a gradient is missing, does nothing and returns False.

        A gradient that shares its memory is averaged in a copy, since the backward goes on and may still read it.
        """
        gradients = self._gradients.active[at]
        if gradients is None:
            return True
        memory = gradients.collect(copy_shared=True)
        if memory is None:
            return False
        self._start(at, gradients, memory, async_op=True)
        return True

    def average_from(self, first: int, copy_shared: bool) -> bool:
        """Averages the buckets from `first` on, unless gradients are missing, and waits for all calls.

        Args:
            first: the number of the first bucket that was not started early.
            copy_shared: whether gradients that share memory with other tensors are averaged in copies.

        Returns:
            False if gradients are missing.
        """
        active = enumerate(self._gradients.active)
        rest = [(at, gradients) for at, gradients in active if at >= first and gradients is not None]
        memories = _collect(rest, copy_shared)
        sparse = self._gradients.active_sparse()
        if len(memories) != len(rest) or any(param.grad is None for param in sparse):
            self._finish()
            if self._checks is not None:
                self._checks.forget()
            return False
        if have_aliases(memories):
            # On another rank, with a batch of another size, they may not, and all ranks must reduce the same.
            memories = _collect(rest, copy_shared=True)
        if self.comm_hook is None and memories and not self.same_batches.is_over:
            self.same_batches.add_to(memories[-1], rest[-1][1].dtype)
        for (at, gradients), memory in zip(rest, memories, strict=True):
            self._start(at, gradients, memory, async_op=False)
        if sparse:
            if self._checks is not None:
                self._checks.look_at(self._gradients.active_sparse_names(), [param.grad for param in sparse])
            average_sparse(sparse, self._group, self.scale)
            if self._checks is not None:
                self._checks.averaged([param.grad for param in sparse])
        self._finish()
        if self._checks is not None:
            self._checks.end()
        return True

    def average_present(self, copy_shared: bool) -> None:
        """Averages the gradients that any rank has; zeros stand in on the ranks that do not have them.

        Without any gradient it makes no call: a rank that computes the gradients of other tensors, with
        `torch.autograd.grad`, may do so alone.
        """
        if self._gradients.any_present():
            with self._gradients.only_present(self._group):
                self.average_from(0, copy_shared)

    def abandon(self) -> None:
        """Gives up the calls in flight after an error, without waiting for them."""
        self._in_flight.clear()
        self._over.clear()
        if self._checks is not None:
            self._checks.forget()
        self._recorded.forget()
        self.same_batches.is_over = True

    def _start(self, at: int, gradients: BucketGradients, memory: Memory, async_op: bool) -> None:
        work: Work | HookedWork | None
        self.note_ready(at)
        if self._checks is not None:
            self._checks.look(gradients.names, memory.tensors, memory.pieces, gradients.dtype_code)
        self._recorded.sent(at)
        if self.comm_hook is None:
            work = self._group.all_reduce_memory(
                memory.pieces,
                memory.tensors,
                gradients.dtype_code,
                memory.count,
                ReduceOp.AVG,
                async_op,
                self._wires.of(at, gradients.names),
            )
        else:
            work = self.comm_hook.start(at, self._gradients.is_last(at), gradients, memory)
        if work is None:
            self._recorded.done(at)
            self._over.append(memory)
        else:
            self._in_flight.append((at, work, memory))

    def _finish(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        over, self._over = self._over, []
        for at, work, memory in in_flight:
            work.wait()
            self._recorded.done(at)
            over.append(memory)
        if not self.same_batches.is_over:
            self.same_batches.arrive()
        for memory in over:
            if self.scale != 1:
                torch._foreach_mul_(memory.tensors, self.scale)
            memory.write_back()


def _collect(buckets: Sequence[tuple[int, BucketGradients]], copy_shared: bool) -> list[Memory]:
    """Returns the memory of the buckets in which no gradient is missing."""
    return [memory for _, gradients in buckets if (memory := gradients.collect(copy_shared)) is not None]
