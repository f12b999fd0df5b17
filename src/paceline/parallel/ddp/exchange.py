"""Which gradients are there, and how they become averages over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import ReduceOp
from paceline.group.work import Work
from paceline.parallel.ddp.buckets import bucket_params
from paceline.parallel.ddp.fused_step import step_params, take_over_steps
from paceline.parallel.ddp.gradients import BucketGradients, Memory, have_aliases
from paceline.parallel.ddp.hook import CommHook, HookedWork
from paceline.parallel.ddp.same_batches import SameBatches
from paceline.parallel.ddp.sparse import average_sparse, empty_gradient
from paceline.parallel.tracked_tensors import TrackedTensors


class Exchange:
    """The gradients of a module, and the calls that average them over the ranks of `group`.

    Dense gradients go in `buckets`, by index of `params`; sparse ones on their own, behind them. When to make the calls
    is for the reducer to say.
    """

    def __init__(self, tracked: TrackedTensors, bucket_cap_bytes: int, group: ProcessGroup) -> None:
        self.names = list(tracked.trained)
        self.params = list(tracked.trained.values())
        sparse = [at for at, name in enumerate(self.names) if name in tracked.sparse]
        self.buckets = bucket_params(self.params, bucket_cap_bytes, sparse)
        self.group = group
        self.comm_hook: CommHook | None = None  # averages instead of the engine
        self.scale = 1.0  # what averages are multiplied by
        self.same_batches = SameBatches(group, on_cpu=all(param.is_cpu for param in self.params))
        self._stepped = take_over_steps(tracked.trained)
        self._all: list[BucketGradients | None] = [self._gradients_of(bucket.params) for bucket in self.buckets]
        self._all_sparse = sparse
        # Without the parameters to which no rank has a gradient:
        self._now = self._all
        self._now_sparse = sparse
        self._absent: list[int] = []  # to which, in a static graph, only other ranks have a gradient
        self._flying: list[tuple[Work | HookedWork, Memory]] = []
        self._reduced: list[Memory] = []  # and not written back

    def _gradients_of(self, indices: Sequence[int]) -> BucketGradients:
        return BucketGradients([self.params[i] for i in indices], [self.names[i] for i in indices])

    def missing(self) -> list[str]:
        """The names of the parameters that should have a gradient and have none."""
        missing = {name for gradients in self._all if gradients is not None for name in gradients.missing()}
        missing.update(self.names[at] for at in self._all_sparse if self.params[at].grad is None)
        return [name for name in self.names if name in missing]

    def start_early(self, at: int) -> bool:
        """Starts the reduction of a bucket while backward goes on; False if it has not all its gradients."""
        gradients = self._now[at]
        if gradients is None:
            return True
        memory = gradients.collect(wary=True)
        if memory is None:
            return False
        self._start(at, gradients, memory, async_op=True)
        return True

    def reduce_rest(self, first: int, wary: bool) -> bool:
        """Reduces the buckets from `first` on, unless gradients are missing; waits for those that were started.

        Returns:
            Whether none is missing.
        """
        rest = [(at, gradients) for at, gradients in enumerate(self._now) if at >= first and gradients is not None]
        memories = _collect(rest, wary)
        sparse = [self.params[at] for at in self._now_sparse]
        if len(memories) != len(rest) or any(param.grad is None for param in sparse):
            self._finish()
            return False
        if have_aliases(memories):
            # On another rank, with a batch of another size, they may be apart, and all must reduce the same.
            memories = _collect(rest, wary=True)
        if self.comm_hook is None and memories and not self.same_batches.is_over:
            self.same_batches.add_to(memories[-1], rest[-1][1].dtype)
        for (at, gradients), memory in zip(rest, memories, strict=True):
            self._start(at, gradients, memory, async_op=False)
        if sparse:
            average_sparse(sparse, self.group, self.scale)
        self._finish()
        return True

    def step(self) -> None:
        """Has optimizers step that were put into backward."""
        step_params(self._stepped)

    def forget(self) -> None:
        """Leaves reductions to themselves, after an error."""
        self._flying.clear()
        self._reduced.clear()
        self.same_batches.is_over = True

    def _start(self, at: int, gradients: BucketGradients, memory: Memory, async_op: bool) -> None:
        work: Work | HookedWork | None
        if self.comm_hook is None:
            work = gradients.reduce(memory, self.group, async_op)
        else:
            is_last = all(later is None for later in self._now[at + 1 :])
            work = self.comm_hook.start(at, is_last, gradients, memory)
        if work is None:
            self._reduced.append(memory)
        else:
            self._flying.append((work, memory))

    def _finish(self) -> None:
        flying, self._flying = self._flying, []
        reduced, self._reduced = self._reduced, []
        for work, memory in flying:
            work.wait()
            reduced.append(memory)
        if not self.same_batches.is_over:
            self.same_batches.arrive()
        for memory in reduced:
            if self.scale != 1:
                torch._foreach_mul_(memory.tensors, self.scale)
            memory.write_back()

    def exchange_present(self) -> list[int]:
        """For each parameter, 1 if any rank has a gradient to it."""
        present = torch.frombuffer(bytearray(param.grad is not None for param in self.params), dtype=torch.uint8)
        self.group.all_reduce(present, ReduceOp.MAX)
        listed: list[int] = present.tolist()
        return listed

    def take_present(self) -> None:
        """Leaves out, this time, what no rank has a gradient to; zeros stand in for those that only others have."""
        everybodys = self.exchange_present()
        self._now, self._now_sparse = self._restricted(everybodys)
        self._fill([at for at, has in enumerate(everybodys) if has])

    def settle_present(self) -> list[int]:
        """Leaves out, for good, what no rank has now, and fills in, from now on, what only others have.

        Where no rank has any gradient nothing is settled: it was no backward of the module's parameters.

        Returns:
            For each parameter, 1 if any rank has a gradient to it.
        """
        mine = [param.grad is not None for param in self.params]
        everybodys = self.exchange_present()
        if not any(everybodys):
            return everybodys
        self._absent = [at for at, has in enumerate(everybodys) if has and not mine[at]]
        self._all, self._all_sparse = self._now, self._now_sparse = self._restricted(everybodys)
        self.fill_absent()
        return everybodys

    def fill_absent(self) -> None:
        """Zeros for the parameters to which, in a static graph, only other ranks have a gradient."""
        self._fill(self._absent)

    def _fill(self, indices: Sequence[int]) -> None:
        for at in indices:
            if self.params[at].grad is None:
                self.params[at].grad = self._zero(at)

    def _zero(self, at: int) -> torch.Tensor:
        param = self.params[at]
        return empty_gradient(param) if at in self._all_sparse else torch.zeros_like(param)

    def gradients(self) -> list[torch.Tensor | None]:
        """The parameters' gradients."""
        return [param.grad for param in self.params]

    def set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Puts others in their place."""
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient

    def zeros(self) -> list[torch.Tensor]:
        """A zero gradient for each parameter."""
        return [self._zero(at) for at in range(len(self.params))]

    def _restricted(self, kept: Sequence[int]) -> tuple[list[BucketGradients | None], list[int]]:
        restricted: list[BucketGradients | None] = []
        for bucket, gradients in zip(self.buckets, self._all, strict=True):
            chosen = [index for index in bucket.params if kept[index]]
            if len(chosen) != len(bucket.params):
                gradients = self._gradients_of(chosen) if chosen else None
            restricted.append(gradients)
        return restricted, [at for at in self._all_sparse if kept[at]]


def _collect(buckets: Sequence[tuple[int, BucketGradients]], wary: bool) -> list[Memory]:
    """The gradients of those buckets that have all."""
    return [memory for _, gradients in buckets if (memory := gradients.collect(wary)) is not None]
