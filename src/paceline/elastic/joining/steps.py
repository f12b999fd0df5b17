"""Steps of optimizers in the usual loop: as members make them, for learners, and as a learner makes them again.

A step follows from the gradients as they are when `optimizer.step()` is called, after clipping and unscaling, from the
options of the groups, such as the learning rate, and from what the optimizer keeps. The last of these a learner has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.elastic.joining.course import StrayedError
from paceline.elastic.joining.wire import Stepped
from paceline.group.buffers import MemoryLayout, memory_layout
from paceline.group.objects.codec import MalformedPayload
from paceline.group.objects.serialization import decode, encode
from paceline.parallel.digests import memory_of
from paceline.parallel.sharded.sums import Values

_CLOSURE = "an optimizer's step was called with a closure, which computes gradients that nobody else has"
_SCALED = "an optimizer's step unscales its gradients itself (GradScaler with a fused optimizer)"

OnStep = Callable[[Stepped, list[memoryview]], None]


@dataclass(frozen=True)
class _Note:
    """A gradient as it was in a round: another one may get the memory of one that was freed, and its version."""

    round: int
    gradient: weakref.ref[torch.Tensor] | None
    layout: MemoryLayout | None
    version: int

    @staticmethod
    def of(round: int, gradient: torch.Tensor | None) -> _Note:
        if gradient is None:
            return _Note(round, None, None, 0)
        return _Note(round, weakref.ref(gradient), _layout(gradient), gradient._version)

    def is_of(self, gradient: torch.Tensor | None) -> bool:
        if self.gradient is None or gradient is None:
            return self.gradient is None and gradient is None
        is_same = self.gradient() is gradient and self.version == gradient._version
        return is_same and self.layout == _layout(gradient)


class Steps:
    """Sees each step of `optimizers` before it is made.

    Attributes:
        on_step: is called with each step of this worker; None while nobody learns.
        at: the round that comes next, and the digest of the result of the round before.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.on_step: OnStep | None = None
        self.at = 0, 0
        self._again: tuple[Stepped, Values] | None = None
        self._notes: dict[int, _Note] = {}  # by parameter
        for name, optimizer in optimizers.items():
            optimizer.register_step_pre_hook(self._hook(name))

    def again(self, item: Stepped, values: Values) -> None:
        """Makes a step of a member with this worker's optimizer.

        Raises:
            StrayedError: this worker's optimizer is another, or raises an error.
        """
        optimizer = self._optimizers.get(item.optimizer)
        if optimizer is None:
            raise StrayedError(f"it has no optimizer {item.optimizer!r}")
        for param in _params(optimizer):
            param.grad = None
        self._again = item, values
        try:
            optimizer.step()
        except StrayedError:
            raise
        except Exception as error:  # hooks and optimizers of the script may raise any
            raise StrayedError(f"a step of the optimizer {item.optimizer!r} failed: {error!r}") from error
        finally:
            self._again = None

    def note(self, params: Iterable[torch.Tensor]) -> None:
        """Notes which gradients these parameters have, since learners have them too."""
        for param in params:
            self._notes[id(param)] = _Note.of(self.at[0], param.grad)

    def forget(self) -> None:
        """Forgets the gradients that were noted."""
        self._notes.clear()

    def are_noted(self, param: torch.Tensor) -> bool:
        """Whether a parameter's gradient was noted in this round, and has not changed since."""
        note = self._notes.get(id(param))
        return note is not None and note.round == self.at[0] and note.is_of(param.grad)

    def _hook(self, name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._again is not None:
                _take_over(optimizer, *self._again)
            elif self.on_step is not None:
                self.on_step(*_describe(name, optimizer, self.at, _closure(args, kwargs)))
                self.note(_params(optimizer))

        return before_step


def _params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _layout(gradient: torch.Tensor) -> MemoryLayout | None:
    return memory_layout(gradient) if gradient.layout is torch.strided else None


def _closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Returns the closure that `step` is called with; the first argument is the optimizer."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def _describe(
    name: str, optimizer: torch.optim.Optimizer, at: tuple[int, int], closure: object
) -> tuple[Stepped, list[memoryview]]:
    """Returns a step as it is logged, without a copy of the gradients."""
    if closure is not None:
        return Stepped(*at, name, obstacle=_CLOSURE), []
    if getattr(optimizer, "grad_scale", None) is not None:
        return Stepped(*at, name, obstacle=_SCALED), []
    options = [{key: each for key, each in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        encoded = encode(options, f"the options of the optimizer {name!r}")
    except TypeError as error:
        return Stepped(*at, name, obstacle=str(error)), []
    gradients = [param.grad for param in _params(optimizer)]
    tensors = [*(each for each in gradients if each is not None), *encoded.buffers]
    memories = [memory_of(each) for each in tensors]
    kinds = tuple((str(each.dtype), tuple(each.shape)) for each in tensors)
    present = tuple(each is not None for each in gradients)
    return Stepped(*at, name, sum(map(len, memories)), kinds, present, bytes(encoded.body)), memories


def _take_over(optimizer: torch.optim.Optimizer, item: Stepped, values: Values) -> None:
    """Gives an optimizer the gradients and options of a member's step.

    Raises:
        StrayedError: they do not fit.
    """
    params, count = [*_params(optimizer)], sum(item.has_gradient)
    if len(params) != len(item.has_gradient):
        raise StrayedError(f"its optimizer {item.optimizer!r} has {len(params)} parameters, not the members' number")
    gradients = iter(values[:count])
    for param, has_gradient in zip(params, item.has_gradient, strict=True):
        param.grad = next(gradients) if has_gradient else None
    try:
        options: Any = decode(item.options, values[count:])
    except MalformedPayload as error:
        raise StrayedError(f"the options of the optimizer {item.optimizer!r} cannot be read: {error}") from error
    for group, given in zip(optimizer.param_groups, options, strict=True):
        group.update(given)
