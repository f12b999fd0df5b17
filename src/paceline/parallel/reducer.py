"""Reduces gradients while backward still computes others.

A hook on each parameter counts its bucket down; full buckets are handed, strictly in order, to the group's progress
thread, which reduces the gradients where autograd put them. When backward ends, the last bucket is reduced on this
thread and the others are waited for. The last bucket's parameters need no hooks: that backward began is seen at
forward's output, and what it left out when it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.engine.codes import DTYPE_CODES
from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import ReduceOp
from paceline.group.work import Work
from paceline.parallel.buckets import Bucket
from paceline.parallel.graph import find_tensors, used_parameters


class Reducer:
    """Averages the gradients of `params` over the ranks of `group`.

    Args:
        names: of the parameters, for messages.
        buckets: over the indices of `params`.
        may_skip: whether parameters may stay without a gradient (find_unused_parameters).
        static_graph: whether the first backward shows how often each parameter gets a gradient in the others.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        buckets: Sequence[Bucket],
        group: ProcessGroup,
        may_skip: bool,
        static_graph: bool,
    ) -> None:
        self.wait_s = 0.0
        self._params = list(params)
        self._names = list(names)
        self._group = group
        self._may_skip = may_skip
        self._learning = static_graph
        self._static_graph = static_graph
        self._bucket_params = [[self._params[index] for index in bucket.params] for bucket in buckets]
        # Address and bytes of each gradient; the addresses are those of the latest backward.
        self._bucket_pieces = [[n for param in each for n in (0, param.nbytes)] for each in self._bucket_params]
        self._bucket_counts = [sum(param.numel() for param in each) for each in self._bucket_params]
        self._bucket_dtypes = [DTYPE_CODES[each[0].dtype] for each in self._bucket_params]
        self._bucket_of = [0] * len(self._params)
        for at, bucket in enumerate(buckets):
            for index in bucket.params:
                self._bucket_of[index] = at
        self._full = [len(bucket.params) for bucket in buckets]  # gradients that fill each bucket
        self._expected = [1] * len(self._params)  # times each parameter gets a gradient in a backward

        self._expecting = False  # the latest forward asked for reduction
        self._started = False  # and a gradient has come since
        self._callback_queued = False
        self._left = list(self._full)
        self._counts = [0] * len(self._params)
        self._next = 0  # the first bucket not yet handed over
        self._works: list[Work] = []
        self._used = [False] * len(self._params)  # since the last reduction
        self._stand_ins: dict[int, torch.Tensor] = {}  # for gradients that other ranks may have
        # Whether each parameter's gradients are counted, also those of the last bucket.
        self._counts_all = may_skip or static_graph
        self._hooks: list[RemovableHandle] = []
        last = len(buckets) - 1
        self._install_hooks(i for i in range(len(self._params)) if self._counts_all or self._bucket_of[i] != last)

    def _install_hooks(self, indices: Iterable[int]) -> None:
        for index in indices:
            hook = self._params[index].register_post_accumulate_grad_hook(self._make_hook(index))
            self._hooks.append(hook)

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def skip(self) -> None:
        """The coming backward only accumulates."""
        self._expecting = False

    def prepare(self, output: object) -> None:
        """The coming backward, of what forward returned, reduces."""
        for work in self._works:  # of a backward that an error ended
            work.wait()
        self._works.clear()
        self._expecting = True
        self._started = False
        self._callback_queued = False
        self._left = list(self._full)
        self._counts = [0] * len(self._params)
        self._next = 0
        self._stand_ins.clear()
        if not self._counts_all:
            self._watch(output)
        used = used_parameters(output) if self._may_skip else None
        if used is not None:
            for index, param in enumerate(self._params):
                if id(param) in used:
                    self._used[index] = True
                else:
                    self._counts[index] = 1
                    self._left[self._bucket_of[index]] -= 1

    def _watch(self, output: object) -> None:
        seen = False
        for tensor in find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._backward_reached)
                seen = True
        if not seen:  # an output whose tensors are out of sight: count every gradient from now on
            self._counts_all = True
            last = len(self._full) - 1
            self._install_hooks(i for i, bucket in enumerate(self._bucket_of) if bucket == last)

    def _backward_reached(self, _: torch.Tensor) -> None:
        if self._expecting and not self._callback_queued:
            self._begin()

    def require_complete(self) -> None:
        """Raises if the latest backward left buckets unreduced.

        Raises:
            RuntimeError: names the parameters without a gradient, and the fix.
        """
        if not self._expecting or not self._started or self._next == len(self._full):
            return
        last = len(self._full) - 1
        missing = [
            name
            for index, name in enumerate(self._names)
            if (
                self._counts[index] < self._expected[index]
                if self._counts_all or self._bucket_of[index] != last
                else self._params[index].grad is None
            )
        ]
        rank = self._group.ranks[self._group.rank()]
        raise RuntimeError(
            f"rank {rank}: the last backward gave no gradient to {len(missing)} parameters "
            f"({', '.join(missing[:10])}{', ...' if len(missing) > 10 else ''}), so their gradients, and those reduced "
            "together with them, were not averaged over the ranks. All of forward's outputs must enter the loss, "
            "or wrap with find_unused_parameters=True"
        )

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        bucket = self._bucket_of[index]

        def ready(_: torch.Tensor) -> None:
            if not self._expecting:
                self._used[index] = True
                return
            if not self._callback_queued:
                self._begin()
            count = self._counts[index] + 1
            self._counts[index] = count
            if self._learning:
                return
            if count != self._expected[index]:
                if count > self._expected[index]:
                    self._raise_twice(index)
                return
            left = self._left[bucket] - 1
            self._left[bucket] = left
            # The last bucket is reduced by `_finish`, on this thread.
            if left == 0 and bucket == self._next and bucket + 1 < len(self._left):
                self._hand_over(len(self._left) - 1)

        return ready

    def _begin(self) -> None:
        self._started = True
        self._callback_queued = True
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _raise_twice(self, index: int) -> None:
        raise RuntimeError(
            f"parameter {self._names[index]!r} got a gradient twice in one backward, after it was handed over for "
            "reduction. It is used in several graphs (for example by reentrant activation checkpointing): wrap with "
            "static_graph=True, or use checkpoint(..., use_reentrant=False)"
        )

    def _hand_over(self, end: int) -> None:
        """Starts the reduction of the full buckets before `end`, in order."""
        while self._next < end and self._left[self._next] == 0:
            work = self._reduce(self._next, async_op=True)
            assert work is not None
            self._works.append(work)
            self._next += 1

    def _reduce(self, bucket: int, async_op: bool) -> Work | None:
        if self._may_skip or self._static_graph:
            return self._group.all_reduce(self._gradients(bucket), ReduceOp.AVG, async_op, any_order=True)
        params = self._bucket_params[bucket]
        gradients = [param.grad for param in params if param.grad is not None]
        for gradient, param in zip(gradients, params, strict=True):
            if not gradient.is_contiguous() and gradient.stride() != param.stride():
                return self._group.all_reduce(gradients, ReduceOp.AVG, async_op)
        pieces = self._bucket_pieces[bucket]
        pieces[0::2] = [gradient.data_ptr() for gradient in gradients]
        dtype, count = self._bucket_dtypes[bucket], self._bucket_counts[bucket]
        return self._group.all_reduce_memory(pieces, gradients, dtype, count, ReduceOp.AVG, async_op)

    def _gradients(self, bucket: int) -> list[torch.Tensor]:
        """With stand-ins for those that this rank does not have."""
        gradients = []
        for index, param in enumerate(self._params):
            if self._bucket_of[index] != bucket or self._expected[index] == 0:
                continue
            if param.grad is not None and (not self._may_skip or self._used[index]):
                gradients.append(param.grad)
                continue
            # Others may have used it: an untouched copy, or zeros, stand in until that is known.
            stand_in = torch.zeros_like(param) if param.grad is None else param.grad.clone()
            self._stand_ins[index] = stand_in
            gradients.append(stand_in)
        return gradients

    def _finish(self) -> None:
        """At the end of backward."""
        self._callback_queued = False
        if self._learning:
            self._learn()
        if not self._counts_all and self._next < len(self._full):
            self._left[-1] = sum(param.grad is None for param in self._bucket_params[-1])
        if any(self._left[self._next :]):
            return  # another backward of the same forward may follow; if not, the next forward tells
        started = time.perf_counter()
        self._hand_over(len(self._full) - 1)
        if self._next < len(self._full):
            self._reduce(self._next, async_op=False)
            self._next += 1
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._may_skip:
            self._settle_stand_ins()
        self._expecting = False
        self.wait_s += time.perf_counter() - started

    def _learn(self) -> None:
        self._learning = False
        self._expected = list(self._counts)
        self._full = [0] * len(self._full)
        for index, expected in enumerate(self._expected):
            if expected:
                self._full[self._bucket_of[index]] += 1
        self._left = [0] * len(self._full)

    def _settle_stand_ins(self) -> None:
        """Parameters that no rank used keep the gradient they had, or none."""
        used = torch.tensor(self._used, dtype=torch.uint8)
        self._group.all_reduce(used, ReduceOp.MAX)
        for index, stand_in in self._stand_ins.items():
            if used[index]:
                param = self._params[index]
                if param.grad is None:
                    param.grad = stand_in
                else:
                    param.grad.copy_(stand_in)
        self._stand_ins.clear()
        self._used = [False] * len(self._params)
