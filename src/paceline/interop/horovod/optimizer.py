"""`DistributedOptimizer`, which reduces gradients in buckets during backward, in the same order on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from paceline.comm.engine.channel import ReduceOp
from paceline.comm.group.eager import eager
from paceline.errors import CollectiveError
from paceline.interop.horovod.basics import ProcessSet, global_process_set
from paceline.interop.horovod.call_queue import CallHandle
from paceline.interop.horovod.collectives import (
    Average,
    Compression,
    Compressor,
    Op,
    ScaledReduction,
    allreduce,
    reduction,
    reduction_request,
)
from paceline.interop.horovod.uneven_collectives import sparse_allreduce_request

_BUCKET_BYTES = 25 << 20  # DistributedDataParallel's default bucket size


@dataclass(frozen=True)
class ReductionOptions:
    """Options for the reduction of gradients. The attributes correspond to arguments of `DistributedOptimizer`."""

    op: ReduceOp
    compression: type[Compressor]
    predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet


@dataclass
class _Bucket:
    """A set of parameters whose gradients are reduced together, with the calls in progress."""

    params: list[torch.Tensor]
    missing: int = 0  # number of parameters whose gradients are incomplete
    # the parameters with dense gradients, each with its compression context
    dense: list[tuple[torch.Tensor, torch.dtype | None]] = field(default_factory=list)
    dense_sums: CallHandle[list[torch.Tensor]] | None = None
    sparse: list[tuple[torch.Tensor, CallHandle[torch.Tensor]]] = field(default_factory=list)


class HorovodGradientReducer:
    """Reduces the gradients of `params`, which are in the same order on every rank, during the backward pass.

    A gradient is complete after `passes` backward passes. The reduction of a bucket starts when its gradients are
    complete and the reductions of all earlier buckets have started. The order of calls therefore does not depend on the
    order in which gradients are computed.
    """

    def __init__(self, params: Sequence[torch.Tensor], passes: int, how: ReductionOptions) -> None:
        self.passes = passes
        self._how = how
        self._calls = how.process_set.calls()
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.Tensor, _Bucket] = {}
        self._remaining: dict[torch.Tensor, int] = {}
        self._next = 0
        self.include(params)

    @property
    def is_pending(self) -> bool:
        """Whether gradients have been computed since the latest call to `finish`."""
        return any(count != self.passes for count in self._remaining.values())

    def set_passes(self, passes: int) -> None:
        """Sets the number of backward passes per reduction, starting with the next step."""
        self.passes = passes
        self._reset()

    def include(self, params: Sequence[torch.Tensor]) -> None:
        """Adds the parameters that are not reduced yet. Their gradients, if any, are part of the next reduction."""
        buckets = _buckets([param for param in params if param not in self._bucket_of])
        self._buckets += buckets
        for bucket in buckets:
            bucket.missing = len(bucket.params)
            for param in bucket.params:
                self._bucket_of[param] = bucket
                self._remaining[param] = self.passes
                param.register_post_accumulate_grad_hook(self._on_gradient)

    def finish(self) -> None:
        """Reduces the remaining buckets (missing gradients count as zeros) and waits for all buckets."""
        try:
            for bucket in self._buckets[self._next :]:
                self._begin(bucket)
            for bucket in self._buckets:
                self._write_back(bucket)
        except CollectiveError:
            self.discard()
            raise
        self._reset()

    def discard(self) -> None:
        """Waits for the reductions in progress and ignores their results and errors."""
        for bucket in self._buckets:
            with suppress(CollectiveError):
                if bucket.dense_sums is not None:
                    bucket.dense_sums.result()
            for _, handle in bucket.sparse:
                with suppress(CollectiveError):
                    handle.result()
        self._reset()

    def _reset(self) -> None:
        self._remaining = dict.fromkeys(self._bucket_of, self.passes)
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.params)
            bucket.dense, bucket.dense_sums, bucket.sparse = [], None, []

    @eager
    def _on_gradient(self, param: torch.Tensor) -> None:
        bucket = self._bucket_of[param]
        if self._remaining[param] <= 0:
            raise AssertionError(
                f"rank {self._calls.group.rank()}: a gradient was computed more than backward_passes_per_step = "
                f"{self.passes} times before optimizer.step(); call step() or synchronize() after that many backward "
                "passes, or increase backward_passes_per_step"
            )
        self._remaining[param] -= 1
        if self._remaining[param] == 0:
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
                request = sparse_allreduce_request(param.grad, None, self._how.op, self._how.process_set)
                bucket.sparse.append((param, CallHandle(self._calls, request)))
                continue
            gradient = param.grad.to_dense() if param.grad.is_sparse else param.grad
            tensor, ctx = self._how.compression.compress(gradient)
            compressed.append(tensor)
            bucket.dense.append((param, ctx))
        if compressed:
            before, after = 1.0 / self._how.predivide_factor, self._how.predivide_factor
            how = ScaledReduction(self._how.op, before, after)
            sums = reduction_request(compressed, how, None, self._how.process_set, lambda: compressed)
            bucket.dense_sums = CallHandle(self._calls, sums)

    def _write_back(self, bucket: _Bucket) -> None:
        """Waits for a bucket's reduction and copies the results into the gradients."""
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
    """Divides the parameters into buckets by dtype, in reverse order, which approximates the backward pass's order."""
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


AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


class _Distributed(torch.optim.Optimizer):
    """The methods that `DistributedOptimizer` adds to the optimizer's class."""

    _reducer: HorovodGradientReducer | None
    _synchronizes: bool
    _is_synchronized: bool
    _parameter_names: dict[torch.Tensor, str]
    _process_set: ProcessSet

    def synchronize(self) -> None:
        """Waits until the gradients are reduced. `step` calls this unless `skip_synchronize` is active."""
        if self._reducer is not None:
            # Parameters that were added or unfrozen after the construction would otherwise differ between ranks.
            self._reducer.include(
                [param for group in self.param_groups for param in group["params"] if param.requires_grad]
            )
            self._reducer.finish()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Makes `step` skip the reduction after an explicit call to `synchronize`, for example to clip gradients."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes to accumulate before a reduction."""
        if self._reducer is not None:
            self._reducer.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits until the gradients are reduced and runs the optimizer's step.

        Args:
            closure: A function that computes the loss and the gradients. After each call, the gradients are reduced and
                the loss is averaged over the ranks, so the optimizer makes the same decisions on every rank.

        Raises:
            ValueError: a closure was given within `skip_synchronize`, so its gradients would not be reduced.
        """
        if closure is not None:
            return self._step_by(closure)
        if self._synchronizes:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are reduced twice",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        return super().step()

    def _step_by(self, closure: Callable[[], Any]) -> Any:
        if not self._synchronizes:
            raise ValueError(
                "optimizer.step(closure) within skip_synchronize() would apply gradients that are not reduced, and the "
                "ranks' parameters would differ; call step(closure) outside of it, or compute the gradients before"
            )

        def reduced() -> Any:
            loss = closure()
            self.synchronize()
            if self._reducer is None or loss is None:
                return loss
            value = loss.detach() if isinstance(loss, torch.Tensor) else torch.as_tensor(loss, device="cpu")
            mean = allreduce(value, process_set=self._process_set)
            return mean if isinstance(loss, torch.Tensor) else mean.item()

        result = super().step(reduced)
        self._is_synchronized = False
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients.

        Raises:
            AssertionError: a reduction is in progress.
        """
        if self._reducer is not None and self._reducer.is_pending:
            raise AssertionError(
                "optimizer.zero_grad() was called after backward and before optimizer.step() or synchronize(), while "
                "gradients are being reduced; call it before backward"
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the optimizer's state. Gradients that were already computed for the next step are discarded."""
        super().load_state_dict(state_dict)
        if self._reducer is not None:
            self._reducer.discard()
        self._is_synchronized = False


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: AnyOptimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> AnyOptimizer:
    """Returns an optimizer that averages gradients over the ranks, with the parameters and state of `optimizer`.

    Args:
        optimizer: The optimizer to replace; do not use it afterward.
        named_parameters: `model.named_parameters()`; must include every parameter in the optimizer. Parameters that are
            added to the optimizer or unfrozen later are reduced as well; every rank must add or unfreeze them before
            the same step.
        compression: `Compression.none`, or `Compression.fp16` to reduce in half precision.
        backward_passes_per_step: The number of backward passes to accumulate before a reduction.
        op: `Average` (the default) or another reduction.
        gradient_predivide_factor: A factor by which gradients are divided before the sum and by which the sum is
            multiplied.
        num_groups: Ignored, because gradients are always reduced in buckets.
        groups: A list of parameter groups or a number of groups. It is validated but has no other effect.
        sparse_as_dense: Whether to convert sparse gradients to dense gradients before the reduction.
        process_set: The ranks whose gradients are reduced. Other ranks step with their own gradients.

    Raises:
        ValueError: a parameter has no name, a name is not unique, a number is out of range, or `groups` is malformed.
        NotImplementedError: `op` is Adasum.
    """
    by = reduction(op)
    if gradient_predivide_factor != 1.0 and by is not Average:
        raise ValueError("gradient_predivide_factor divides an average in two; it requires op=Average")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}; it must be at least 1")
    _require_groups(groups)
    names = _names(optimizer, named_parameters)
    params = [param for param in names if param.requires_grad]
    kind = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {"__doc__": type(optimizer).__doc__})
    taken_over: Any = object.__new__(kind)
    # An existing scheduler has stored its own `step` in the optimizer's attributes, which would bypass this class.
    taken_over.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    how = ReductionOptions(by, compression, gradient_predivide_factor, sparse_as_dense, process_set)
    reduces = process_set.included() and process_set.size() > 1
    taken_over._reducer = HorovodGradientReducer(params, backward_passes_per_step, how) if reduces else None
    taken_over._synchronizes, taken_over._is_synchronized = True, False
    taken_over._parameter_names, taken_over._process_set = names, process_set
    result: AnyOptimizer = taken_over
    return result


def _require_groups(groups: int | Sequence[Sequence[torch.Tensor]] | None) -> None:
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if isinstance(groups, int):
        raise ValueError(f"groups is {groups}; it is a positive number of groups or a list of lists of parameters")
    grouped = [param for group in groups for param in group]
    if not all(isinstance(param, torch.Tensor) for param in grouped):
        raise ValueError("groups has an entry that is not a tensor; it is a list of lists of parameters")
    if len({id(param) for param in grouped}) != len(grouped):
        raise ValueError("groups contains a parameter twice; each parameter may be in at most one group")


def _names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Returns the optimizer's parameters with their names, in the order of `named_parameters`."""
    mine: list[list[torch.Tensor]] = [group["params"] for group in optimizer.param_groups]
    if named_parameters is None:
        return {
            param: f"allreduce.noname.{index}.{number}"
            for index, group in enumerate(mine)
            for number, param in enumerate(group)
        }
    named = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            "named_parameters takes pairs of a name and a parameter, as returned by model.named_parameters()"
        )
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"names in named_parameters must differ from each other; these occur twice: {', '.join(twice)}"
        )
    owned = [param for group in mine for param in group]
    known = {id(param) for _, param in named}
    if unnamed := sum(id(param) not in known for param in owned):
        raise ValueError(f"named_parameters has no name for {unnamed} of the {len(owned)} parameters of the optimizer")
    chosen = {id(param) for param in owned}
    return {param: name for name, param in named if id(param) in chosen}
