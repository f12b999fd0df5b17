"""Reduces gradients during backward, in buckets whose order is the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.group.eager import eager
from paceline.group.reduce_op import ReduceOp
from paceline.horovod.calls import Scaled, reducing
from paceline.horovod.compression import Compressor
from paceline.horovod.handles import Handle
from paceline.horovod.process_sets import ProcessSet
from paceline.horovod.varying import adding_sparse

_BUCKET_BYTES = 25 << 20  # that of DistributedDataParallel


@dataclass(frozen=True)
class Reducing:
    """How gradients are reduced; the attributes are the arguments of `DistributedOptimizer`."""

    op: ReduceOp
    compression: type[Compressor]
    predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet


@dataclass
class _Bucket:
    """Parameters whose gradients are reduced together; while that runs, its calls and what undoes the compression."""

    params: list[torch.Tensor]
    missing: int = 0  # parameters whose gradients are not complete
    dense: list[tuple[torch.Tensor, torch.dtype | None]] = field(default_factory=list)  # each parameter's type
    dense_sums: Handle[list[torch.Tensor]] | None = None
    sparse: list[tuple[torch.Tensor, Handle[torch.Tensor]]] = field(default_factory=list)


class GradientReducer:
    """Reduces the gradients of `params` while backward runs.

    A gradient is complete after `passes` backwards. A bucket begins when its gradients are complete and all buckets
    before it have begun, so the ranks make the same calls in the same order, whatever the order of their gradients.

    Args:
        params: the parameters, in an order that is the same on every rank.
        passes: how many backwards add to a gradient before it is reduced.
        how: how gradients are reduced.
    """

    def __init__(self, params: Sequence[torch.Tensor], passes: int, how: Reducing) -> None:
        self.passes = passes
        self._how = how
        self._calls = how.process_set.calls()
        self._buckets = _buckets(params)
        self._bucket_of = {param: bucket for bucket in self._buckets for param in bucket.params}
        self._to_come: dict[torch.Tensor, int] = {}
        self._next = 0
        self._reset()
        for param in self._bucket_of:
            param.register_post_accumulate_grad_hook(self._on_gradient)

    @property
    def is_pending(self) -> bool:
        """Whether gradients have come since the last `finish`."""
        return any(count != self.passes for count in self._to_come.values())

    def set_passes(self, passes: int) -> None:
        """Sets how many backwards add to a gradient, from the next step on."""
        self.passes = passes
        self._reset()

    def finish(self) -> None:
        """Reduces what is left, with zeros for gradients that have not come, and waits for all buckets.

        Raises:
            PeerLostError, CollectiveMismatchError, CollectiveTimeoutError: a reduction failed.
        """
        for bucket in self._buckets[self._next :]:
            self._begin(bucket)
        for bucket in self._buckets:
            self._take_back(bucket)
        self._reset()

    def _reset(self) -> None:
        self._to_come = dict.fromkeys(self._bucket_of, self.passes)
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.params)
            bucket.dense, bucket.dense_sums, bucket.sparse = [], None, []

    @eager
    def _on_gradient(self, param: torch.Tensor) -> None:
        bucket = self._bucket_of[param]
        if self._to_come[param] <= 0:
            raise AssertionError(
                f"rank {self._calls.group.rank()}: a gradient was computed more than backward_passes_per_step = "
                f"{self.passes} times before optimizer.step(); call step() or synchronize() after that many "
                "backwards, or increase backward_passes_per_step"
            )
        self._to_come[param] -= 1
        if self._to_come[param] == 0:
            bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._begin(self._buckets[self._next])
            self._next += 1

    def _begin(self, bucket: _Bucket) -> None:
        compressed = []
        for param in bucket.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            if param.grad.is_sparse and not self._how.sparse_as_dense:
                request = adding_sparse(param.grad, None, self._how.op, self._how.process_set)
                bucket.sparse.append((param, Handle(self._calls, request)))
                continue
            gradient = param.grad.to_dense() if param.grad.is_sparse else param.grad
            tensor, ctx = self._how.compression.compress(gradient)
            compressed.append(tensor)
            bucket.dense.append((param, ctx))
        if compressed:
            before, after = 1.0 / self._how.predivide_factor, self._how.predivide_factor
            how = Scaled(self._how.op, before, after)
            sums = reducing(compressed, how, None, self._how.process_set, lambda: compressed)
            bucket.dense_sums = Handle(self._calls, sums)

    def _take_back(self, bucket: _Bucket) -> None:
        """Waits for a bucket, and puts what was reduced into the gradients."""
        for param, handle in bucket.sparse:
            param.grad = handle.result()
        sums = [] if bucket.dense_sums is None else bucket.dense_sums.result()
        for (param, ctx), tensor in zip(bucket.dense, sums, strict=True):
            result = self._how.compression.decompress(tensor, ctx)
            assert param.grad is not None
            if param.grad.is_sparse:
                param.grad = result.to_sparse()
            elif result is not param.grad:
                param.grad.copy_(result)


def _buckets(params: Sequence[torch.Tensor]) -> list[_Bucket]:
    """Returns the parameters in buckets of one type each, in the reverse order, which is about that of backward."""
    buckets: list[_Bucket] = []
    nbytes = 0
    for param in reversed(params):
        size = param.numel() * param.element_size()
        last = buckets[-1].params if buckets else []
        if not last or last[0].dtype != param.dtype or nbytes + size > _BUCKET_BYTES:
            buckets.append(_Bucket([]))
            nbytes = 0
        buckets[-1].params.append(param)
        nbytes += size
    return buckets
