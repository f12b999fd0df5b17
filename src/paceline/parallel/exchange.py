"""Which gradients are there, and how they become averages over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import ReduceOp
from paceline.group.work import Work
from paceline.parallel.bucket_hook import CommHook, HookedWork
from paceline.parallel.buckets import Bucket
from paceline.parallel.gradients import BucketGradients, Memory, have_aliases


class Exchange:
    """The gradients of `params`, in buckets, and the calls that average them over the ranks of `group`.

    When to make the calls is for the reducer to say.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], names: Sequence[str], buckets: Sequence[Bucket], group: ProcessGroup
    ) -> None:
        self.params = list(params)
        self.names = list(names)
        self.group = group
        self.comm_hook: CommHook | None = None  # averages instead of the engine
        self.scale = 1.0  # what averages are multiplied by
        self._buckets = list(buckets)
        self._all: list[BucketGradients | None] = [self._gradients_of(bucket.params) for bucket in buckets]
        self._now = self._all  # without the parameters to which no rank has a gradient
        self._absent: list[nn.Parameter] = []  # to which, in a static graph, only other ranks have a gradient
        self._flying: list[tuple[Work | HookedWork, Memory]] = []
        self._reduced: list[Memory] = []  # and not written back

    def _gradients_of(self, indices: Sequence[int]) -> BucketGradients:
        return BucketGradients([self.params[i] for i in indices], [self.names[i] for i in indices])

    def missing(self) -> list[str]:
        """The names of the parameters that should have a gradient and have none."""
        missing = {name for gradients in self._all if gradients is not None for name in gradients.missing()}
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
        if len(memories) != len(rest):
            self._finish()
            return False
        if have_aliases(memories):
            # On another rank, with a batch of another size, they may be apart, and all must reduce the same.
            memories = _collect(rest, wary=True)
        for (at, gradients), memory in zip(rest, memories, strict=True):
            self._start(at, gradients, memory, async_op=False)
        self._finish()
        return True

    def forget(self) -> None:
        """Leaves reductions to themselves, after an error."""
        self._flying.clear()
        self._reduced.clear()

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
        self._now = self._restricted(everybodys)
        for param, has in zip(self.params, everybodys, strict=True):
            if has and param.grad is None:
                param.grad = torch.zeros_like(param)

    def settle_present(self) -> list[int]:
        """Leaves out, for good, what no rank has now, and fills in, from now on, what only others have.

        Returns:
            For each parameter, 1 if any rank has a gradient to it.
        """
        mine = [param.grad is not None for param in self.params]
        everybodys = self.exchange_present()
        self._absent = [p for p, own, has in zip(self.params, mine, everybodys, strict=True) if has and not own]
        self._all = self._now = self._restricted(everybodys)
        self.fill_absent()
        return everybodys

    def fill_absent(self) -> None:
        """Zeros for the parameters to which, in a static graph, only other ranks have a gradient."""
        for param in self._absent:
            if param.grad is None:
                param.grad = torch.zeros_like(param)

    def with_zeros(self, reduce: Callable[[], None], leave_out: bool) -> None:
        """Calls `reduce` with a zero, or with `leave_out` nothing, in the place of every gradient."""
        kept = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None if leave_out else torch.zeros_like(param)
        try:
            reduce()
        finally:
            for param, gradient in zip(self.params, kept, strict=True):
                param.grad = gradient

    def _restricted(self, kept: Sequence[int]) -> list[BucketGradients | None]:
        restricted: list[BucketGradients | None] = []
        for bucket, gradients in zip(self._buckets, self._all, strict=True):
            chosen = [index for index in bucket.params if kept[index]]
            if len(chosen) != len(bucket.params):
                gradients = self._gradients_of(chosen) if chosen else None
            restricted.append(gradients)
        return restricted


def _collect(buckets: Sequence[tuple[int, BucketGradients]], wary: bool) -> list[Memory]:
    """The gradients of those buckets that have all."""
    return [memory for _, gradients in buckets if (memory := gradients.collect(wary)) is not None]
