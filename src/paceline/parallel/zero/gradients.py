"""Averages each gradient into its owner's while backward computes others, and frees the other ranks' (ZeRO stage 2).

A bucket goes when its last gradient has come. With `in_order` it also waits for the buckets before it, so that ranks
agree on the order whatever autograd does. What is left when backward ends, because no rank or only some ranks had a
gradient, is settled then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import ReduceOp
from paceline.group.work import Work
from paceline.parallel.gradients import shares_memory
from paceline.parallel.zero.backward import BackwardEnd


class GradientReducer:
    """Averages the gradients of `params` over the ranks of `group`.

    Args:
        params, owners: the parameters that require a gradient, and the group rank that owns each.
        buckets: indices of `params`, each in one bucket; the same on every rank.
        group: the ranks.
        ends: tells when a backward ends.
        shard: only the owner keeps the gradient; without it all do.
        in_order: reduce the buckets one after the other, in the order given.
        overlap: reduce on the group's progress thread while backward goes on.
        reduced: is called with a bucket's number when the gradients of this rank are not needed any more.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        owners: Sequence[int],
        buckets: Sequence[Sequence[int]],
        group: ProcessGroup,
        ends: BackwardEnd,
        *,
        shard: bool,
        in_order: bool,
        overlap: bool,
        reduced: Callable[[int], None] = lambda bucket: None,
    ) -> None:
        self._params = list(params)
        self._shapes = [param.shape for param in params]
        self._owners = list(owners)
        self._buckets = [list(bucket) for bucket in buckets]
        self._bucket_of = {index: at for at, bucket in enumerate(buckets) for index in bucket}
        self._group = group
        self._ends = ends
        self._shard = shard
        self._in_order = in_order
        self._overlap = overlap
        self._reduced = reduced
        ends.callbacks.append(self._finish)
        self._handles = []
        for index, param in enumerate(self._params):
            if shard and owners[index] == group.rank():
                self._handles.append(param.register_hook(partial(self._set_aside, index)))
            self._handles.append(param.register_post_accumulate_grad_hook(partial(self._arrive, index)))
        self.forget()

    def close(self) -> None:
        """Leaves the parameters alone from now on; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._finish in self._ends.callbacks:
            self._ends.callbacks.remove(self._finish)

    def forget(self) -> None:
        """As if no backward had begun."""
        self._arrived: set[int] = set()
        self._done = [False] * len(self._buckets)
        self._left = [len(bucket) for bucket in self._buckets]
        self._earlier: dict[int, torch.Tensor] = {}
        self._flying: list[tuple[Work, list[int], list[torch.Tensor]]] = []

    def _set_aside(self, index: int, _: torch.Tensor) -> None:
        """Before autograd adds to a gradient that was averaged in an earlier backward: the new one comes apart."""
        param = self._params[index]
        if param.grad is not None:
            self._earlier[index] = param.grad
            param.grad = None

    def _arrive(self, index: int, _: torch.Tensor) -> None:
        self._ends.begin()
        bucket = self._bucket_of[index]
        if index in self._arrived:
            raise RuntimeError(
                f"rank {self._group.ranks[self._group.rank()]}: parameter {index} got two gradients in one backward, "
                "so it is used in several graphs. Use checkpoint(..., use_reentrant=False)"
            )
        self._arrived.add(index)
        self._left[bucket] -= 1
        if not self._in_order:
            if self._left[bucket] == 0:
                self._reduce(bucket, self._buckets[bucket])
            return
        while bucket < len(self._buckets) and self._left[bucket] == 0 and (bucket == 0 or self._done[bucket - 1]):
            self._reduce(bucket, self._buckets[bucket])
            bucket += 1

    def _reduce(self, bucket: int, indices: Sequence[int]) -> None:
        alike: dict[tuple[int, torch.dtype], list[int]] = {}
        for index in indices:
            owner = self._owners[index] if self._shard else -1
            alike.setdefault((owner, self._params[index].dtype), []).append(index)
        for (owner, _), members in alike.items():
            gradients = [self._take(index, owner) for index in members]
            if owner >= 0:
                work = self._group.reduce(gradients, owner, ReduceOp.AVG, async_op=self._overlap)
            else:
                work = self._group.all_reduce(gradients, ReduceOp.AVG, async_op=self._overlap)
            if work is None:
                self._settle(members, gradients)
            else:
                self._flying.append((work, members, gradients))
        self._done[bucket] = True
        self._reduced(bucket)

    def _take(self, index: int, owner: int) -> torch.Tensor:
        """This rank's gradient, which is the owner's memory to be written to."""
        param = self._params[index]
        gradient = param.grad
        if index not in self._arrived:
            if gradient is not None and owner == self._group.rank():
                self._earlier[index] = gradient
            if gradient is None or owner >= 0:
                gradient = torch.zeros(self._shapes[index], dtype=param.dtype)
        assert gradient is not None
        if owner in (-1, self._group.rank()) and shares_memory(gradient):
            gradient = gradient.clone()  # other layers still wait for what is in that memory
        param.grad = None
        return gradient.detach()

    def _settle(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        for index, gradient in zip(indices, gradients, strict=True):
            if not self._shard or self._owners[index] == self._group.rank():
                earlier = self._earlier.pop(index, None)
                self._params[index].grad = gradient if earlier is None else earlier.add_(gradient)

    def _finish(self) -> None:
        """At the end of a backward."""
        somewhere = torch.zeros(len(self._params), dtype=torch.uint8)
        somewhere[list(self._arrived)] = 1
        self._group.all_reduce(somewhere, ReduceOp.MAX)
        present: list[int] = somewhere.tolist()
        for bucket, done in enumerate(self._done):
            if not done:
                self._reduce(bucket, [index for index in self._buckets[bucket] if present[index]])
        flying, self._flying = self._flying, []
        for work, indices, gradients in flying:
            work.wait()
            self._settle(indices, gradients)
        self.forget()
