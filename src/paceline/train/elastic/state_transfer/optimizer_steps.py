"""Steps of optimizers in the usual loop: as members make them, for receivers, and as a receiver makes them again.

A step follows from the gradients as they are when `optimizer.step()` is called, after clipping and unscaling, from the
options of the groups, such as the learning rate, and from what the optimizer keeps. The last of these a receiver has.

Whether the state of a receiver of the usual loop is still that of the others; pure.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.group.buffers import MemoryLayout, memory_layout
from paceline.comm.group.collectives.object_codec import MalformedPayload, decode, encode
from paceline.train.elastic.state_transfer.transfer_protocol import OptimizerStep, RoundResult
from paceline.train.logical_shards.tree_sum import Values
from paceline.train.module_tensors import memory_of


class StateDivergedError(Exception):
    """The receiver's state is not, or cannot become, that of the others."""


class StateDivergence:
    """What a receiver has made of a snapshot and of the members' steps since.

    A member that has committed a round may be lost before any other knows of it, and the others then commit another
    result. So each step says after which result it was made, and each round which one came before: a receiver that has
    made a step which the others have not notices that.

    Args:
        round_number: the round that follows the snapshot.
        committed: the digest of the result of the round before.
        windows: into how many parts the state is divided, one of which is compared in each round.
        is_large: comparing a part takes a receiver so long that it does so only once with each.
    """

    def __init__(self, round_number: int, committed: int, windows: int, *, is_large: bool = False) -> None:
        self.round = round_number
        self.committed = committed
        self.unchecked = frozenset(range(windows))  # those parts that were not compared since the first step
        self._windows = windows
        self._is_large = is_large
        self._has_stepped = False
        self._steps_of_round = 0

    def steps(self, item: OptimizerStep) -> None:
        """Takes a step that is to be made now.

        Raises:
            StrayedError: it cannot be, or an earlier one was not made by the others.
        """
        if item.obstacle:
            raise StateDivergedError(item.obstacle)
        if self._steps_of_round:
            self._require_same(item.after)
        self.committed = item.after
        self._steps_of_round += 1
        self._has_stepped = True

    def compares(self, round_number: int) -> bool:
        """Whether a part of the receiver's state before a round is to be compared with that of the members."""
        return not self._is_large or (self._has_stepped and round_number % self._windows in self.unchecked)

    def passes(self, item: RoundResult, state: int | None) -> None:
        """Takes a round that the members have committed, and the digest of a part of the receiver's own state before.

        The digest is None where that is not compared.

        Raises:
            StrayedError: the members' state was another.
        """
        if self._steps_of_round:
            self._require_same(item.before)
        if state is not None and item.state != state:
            raise StateDivergedError(
                f"before round {item.round} its state differed from that of the others. Something other than "
                "optimizer.step() changes parameters, or a step does not follow from the gradients alone"
            )
        if state is not None and self._has_stepped:
            self.unchecked -= {item.round % self._windows}
        self.round, self.committed = item.round + 1, item.digest
        self._steps_of_round = 0

    def _require_same(self, digest: int) -> None:
        if digest != self.committed:
            raise StateDivergedError(f"it has made a step before round {self.round} that the others have not committed")


_CLOSURE = "an optimizer's step was called with a closure, which computes gradients that nobody else has"
_SCALED = "an optimizer's step unscales its gradients itself (GradScaler with a fused optimizer)"

OnStep = Callable[[OptimizerStep, list[memoryview]], None]


@dataclass(frozen=True)
class _GradientNote:
    """A gradient as it was in a round: another one may get the memory of one that was freed, and its version."""

    round: int
    gradient: weakref.ref[torch.Tensor] | None
    layout: MemoryLayout | None
    version: int

    @staticmethod
    def of(round: int, gradient: torch.Tensor | None) -> _GradientNote:
        if gradient is None:
            return _GradientNote(round, None, None, 0)
        return _GradientNote(round, weakref.ref(gradient), _layout(gradient), gradient._version)

    def is_of(self, gradient: torch.Tensor | None) -> bool:
        if self.gradient is None or gradient is None:
            return self.gradient is None and gradient is None
        is_same = self.gradient() is gradient and self.version == gradient._version
        return is_same and self.layout == _layout(gradient)


class OptimizerStepHooks:
    """Sees each step of `optimizers` before it is made.

    Attributes:
        on_step: is called with each step of this worker; None while nobody learns.
        at: the round that comes next, and the digest of the result of the round before.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.on_step: OnStep | None = None
        self.at = 0, 0
        self._again: tuple[OptimizerStep, Values] | None = None
        self._notes: dict[int, _GradientNote] = {}  # by parameter
        for name, optimizer in optimizers.items():
            optimizer.register_step_pre_hook(self._hook(name))

    def again(self, item: OptimizerStep, values: Values) -> None:
        """Makes a step of a member with this worker's optimizer.

        Raises:
            StrayedError: this worker's optimizer is another, or raises an error.
        """
        optimizer = self._optimizers.get(item.optimizer)
        if optimizer is None:
            raise StateDivergedError(f"it has no optimizer {item.optimizer!r}")
        for param in _params(optimizer):
            param.grad = None
        self._again = item, values
        try:
            optimizer.step()
        except StateDivergedError:
            raise
        except Exception as error:  # hooks and optimizers of the script may raise any
            raise StateDivergedError(f"a step of the optimizer {item.optimizer!r} failed: {error!r}") from error
        finally:
            self._again = None

    def note(self, params: Iterable[torch.Tensor]) -> None:
        """Notes which gradients these parameters have, since receivers have them too."""
        for param in params:
            self._notes[id(param)] = _GradientNote.of(self.at[0], param.grad)

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
) -> tuple[OptimizerStep, list[memoryview]]:
    """Returns a step as it is logged, without a copy of the gradients."""
    if closure is not None:
        return OptimizerStep(*at, name, obstacle=_CLOSURE), []
    if getattr(optimizer, "grad_scale", None) is not None:
        return OptimizerStep(*at, name, obstacle=_SCALED), []
    options = [{key: each for key, each in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        encoded = encode(options, f"the options of the optimizer {name!r}")
    except TypeError as error:
        return OptimizerStep(*at, name, obstacle=str(error)), []
    gradients = [param.grad for param in _params(optimizer)]
    tensors = [*(each for each in gradients if each is not None), *encoded.buffers]
    memories = [memory_of(each) for each in tensors]
    kinds = tuple((str(each.dtype), tuple(each.shape)) for each in tensors)
    present = tuple(each is not None for each in gradients)
    return OptimizerStep(*at, name, sum(map(len, memories)), kinds, present, bytes(encoded.body)), memories


def _take_over(optimizer: torch.optim.Optimizer, item: OptimizerStep, values: Values) -> None:
    """Gives an optimizer the gradients and options of a member's step.

    Raises:
        StrayedError: they do not fit.
    """
    params, count = [*_params(optimizer)], sum(item.has_gradient)
    if len(params) != len(item.has_gradient):
        raise StateDivergedError(
            f"its optimizer {item.optimizer!r} has {len(params)} parameters, not the members' number"
        )
    gradients = iter(values[:count])
    for param, has_gradient in zip(params, item.has_gradient, strict=True):
        param.grad = next(gradients) if has_gradient else None
    try:
        options: Any = decode(item.options, values[count:])
    except MalformedPayload as error:
        raise StateDivergedError(f"the options of the optimizer {item.optimizer!r} cannot be read: {error}") from error
    for group, given in zip(optimizer.param_groups, options, strict=True):
        group.update(given)
