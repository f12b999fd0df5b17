"""An optimizer that averages gradients over the ranks before its step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from paceline.horovod.compression import Compression, Compressor
from paceline.horovod.gradients import GradientReducer, Reducing
from paceline.horovod.process_sets import ProcessSet, global_process_set
from paceline.horovod.reductions import Average, Op, reduction

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


class _Distributed(torch.optim.Optimizer):
    """What is put in front of an optimizer's own methods."""

    _reducer: GradientReducer | None
    _synchronizes: bool
    _is_synchronized: bool

    def synchronize(self) -> None:
        """Waits until the gradients are reduced; `step` does this itself unless `skip_synchronize` is in force."""
        if self._reducer is not None:
            self._reducer.finish()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Has `step` not reduce gradients, since `synchronize` was called before, such as to clip them."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets how many backwards add to a gradient before it is reduced."""
        if self._reducer is not None:
            self._reducer.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits until the gradients are reduced, and makes the optimizer's own step."""
        if self._synchronizes:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() reduces gradients again that optimizer.synchronize() has reduced; put it into "
                    "`with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients.

        Raises:
            AssertionError: gradients are being reduced.
        """
        if self._reducer is not None and self._reducer.is_pending:
            raise AssertionError(
                "optimizer.zero_grad() was called after backward and before optimizer.step() or synchronize(), while "
                "gradients are being reduced; call it before backward"
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the optimizer's own state."""
        super().load_state_dict(state_dict)
        if self._reducer is not None and not self._reducer.is_pending:
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
    """Returns an optimizer with the parameters and state of `optimizer`, whose gradients are averaged over the ranks.

    Args:
        optimizer: the optimizer to take over; use what is returned in its place.
        named_parameters: `model.named_parameters()`; must have every parameter of the optimizer.
        compression: `Compression.none`, or `Compression.fp16` to reduce in half precision.
        backward_passes_per_step: how many backwards add to a gradient before it is reduced.
        op: `Average` (the default) or another reduction.
        gradient_predivide_factor: gradients are divided by it before the sum, and multiplied afterwards.
        num_groups, groups: are not used, since gradients are always reduced in buckets.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks whose gradients are reduced; others make their own steps.

    Raises:
        ValueError: `op` is Adasum, a parameter has no name or two have one, or a number is out of range.
    """
    by = reduction(op)
    if gradient_predivide_factor != 1.0 and by is not Average:
        raise ValueError("gradient_predivide_factor divides an average in two; it needs op=Average")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}; it must be at least 1")
    params = _parameters(optimizer, named_parameters)
    kind = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {"__doc__": type(optimizer).__doc__})
    taken_over: Any = object.__new__(kind)
    # A scheduler that was made before has put a `step` of its own into the optimizer, which would pass by ours.
    taken_over.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    how = Reducing(by, compression, gradient_predivide_factor, sparse_as_dense, process_set)
    reduces = process_set.included() and process_set.size() > 1
    taken_over._reducer = GradientReducer(params, backward_passes_per_step, how) if reduces else None
    taken_over._synchronizes, taken_over._is_synchronized = True, False
    result: AnyOptimizer = taken_over
    return result


def _parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[torch.Tensor]:
    """Returns the optimizer's parameters that need gradients, in the order of their names' list."""
    mine: list[torch.Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
    if named_parameters is None:
        return [param for param in mine if param.requires_grad]
    named = list(named_parameters)
    if not all(isinstance(each, tuple) and len(each) == 2 for each in named):
        raise ValueError("named_parameters takes pairs of a name and a parameter, as model.named_parameters() gives")
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"names in named_parameters must differ from each other; these occur twice: {', '.join(twice)}"
        )
    known = {id(param) for _, param in named}
    if unnamed := sum(id(param) not in known for param in mine):
        raise ValueError(f"named_parameters has no name for {unnamed} of the {len(mine)} parameters of the optimizer")
    owned = {id(param) for param in mine}
    return [param for _, param in named if param.requires_grad and id(param) in owned]
