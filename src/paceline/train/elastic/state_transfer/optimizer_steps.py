"""Optimizer steps in a DDP loop, as captured by the members and repeated by a receiver.

A step is determined by the gradients at the call to `optimizer.step()` (after clipping and unscaling), the options of
the parameter groups (such as the learning rate), and the optimizer's state. The receiver already has the optimizer's
state.

`StateDivergence`, a pure state machine, detects that a receiver's state differs from that of the members.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paceline.comm.group.buffers import MemoryLayout, memory_layout
from paceline.comm.group.collectives.object_codec import MalformedPayload, decode, encode
from paceline.train.elastic.state_transfer.transfer_protocol import OptimizerStep, RoundResult, kinds_of
from paceline.train.logical_shards.tree_sum import Values
from paceline.train.module_tensors import memory_of


class StateDivergedError(Exception):
    """Raised if the receiver's state differs from that of the members, or cannot become equal to it."""


class StateDivergence:
    """Compares the steps that a receiver has repeated since the snapshot with the members' history.

    A member may be lost after it has committed a round but before any other member has. The other members may then
    commit a different result. Each step therefore contains the digest of the result that preceded it, and each round
    contains the digest of the previous result. With these digests, a receiver detects a step that the other members did
    not perform.

    Args:
        round_number: The round that follows the snapshot.
        committed: The digest of the previous round's result.
        windows: The number of parts into which the state is divided. Each round compares one of them.
        is_large: Whether the state is so large that each part is compared only once.

    Raises:
        StateDivergedError: Raised by `steps` and `passes` if the states differ, or a step cannot be repeated.
    """

    def __init__(self, round_number: int, committed: int, windows: int, *, is_large: bool = False) -> None:
        self.round = round_number
        self.committed = committed
        self.unchecked = frozenset(range(windows))  # parts not compared after the first step
        self._windows = windows
        self._is_large = is_large
        self._has_stepped = False
        self._steps_of_round = 0

    def steps(self, item: OptimizerStep) -> None:
        """Records a step that is about to be repeated."""
        if item.obstacle:
            raise StateDivergedError(item.obstacle)
        if self._steps_of_round:
            self._require_same(item.after)
        self.committed = item.after
        self._steps_of_round += 1
        self._has_stepped = True

    def compares(self, round_number: int) -> bool:
        """Returns True if a round compares a part of the receiver's state with that of the members."""
        return not self._is_large or (self._has_stepped and round_number % self._windows in self.unchecked)

    def passes(self, item: RoundResult, state: int | None) -> None:
        """Records a committed round.

        `state` is the digest of a part of the receiver's state before the round, or None if it is not compared.
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


_CLOSURE = "an optimizer's step was called with a closure, which computes gradients that no other worker has"
_SCALED = "an optimizer's step unscales its gradients itself (GradScaler with a fused optimizer)"

OnStep = Callable[[OptimizerStep, list[memoryview]], None]


@dataclass(frozen=True)
class _GradientNote:
    """Identifies a gradient in one round. Memory and version alone do not suffice, because they may be reused."""

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
    """Intercepts each step of `optimizers` before it is performed.

    Attributes:
        on_step: A function that is called with each of this worker's steps, or None if there are no receivers.
        at: The next round, and the digest of the previous round's result.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.on_step: OnStep | None = None
        self.at = 0, 0
        self._again: tuple[OptimizerStep, Values] | None = None
        self._notes: dict[int, _GradientNote] = {}  # by the parameter's id
        for name, optimizer in optimizers.items():
            optimizer.register_step_pre_hook(partial(self._before_step, name))

    def again(self, item: OptimizerStep, values: Values) -> None:
        """Repeats a member's step; raises StateDivergedError if this worker's optimizer is different or fails."""
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
        except Exception as error:  # the script's hooks and optimizers may raise any exception
            raise StateDivergedError(f"a step of the optimizer {item.optimizer!r} failed: {error!r}") from error
        finally:
            self._again = None

    def note(self, params: Iterable[torch.Tensor]) -> None:
        """Records that receivers have the current gradients of these parameters."""
        for param in params:
            self._notes[id(param)] = _GradientNote.of(self.at[0], param.grad)

    def forget(self) -> None:
        """Discards the recorded gradients."""
        self._notes.clear()

    def are_noted(self, param: torch.Tensor) -> bool:
        """Returns True if a parameter's gradient was recorded in this round and has not changed since then."""
        note = self._notes.get(id(param))
        return note is not None and note.round == self.at[0] and note.is_of(param.grad)

    def _before_step(
        self, name: str, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._again is not None:
            _take_over(optimizer, *self._again)
        elif self.on_step is not None:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first argument is the optimizer
            self.on_step(*_describe(name, optimizer, self.at, closure))
            self.note(_params(optimizer))


def _params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _layout(gradient: torch.Tensor) -> MemoryLayout | None:
    return memory_layout(gradient) if gradient.layout is torch.strided else None


def _describe(
    name: str, optimizer: torch.optim.Optimizer, at: tuple[int, int], closure: object
) -> tuple[OptimizerStep, list[memoryview]]:
    """Returns the log item for a step, and views of the memory of the step's tensors."""
    if closure is not None:
        return OptimizerStep(*at, name, obstacle=_CLOSURE), []
    if getattr(optimizer, "grad_scale", None) is not None:
        return OptimizerStep(*at, name, obstacle=_SCALED), []
    options = [{key: option for key, option in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        encoded = encode(options, f"the options of the optimizer {name!r}")
    except TypeError as error:
        return OptimizerStep(*at, name, obstacle=str(error)), []
    gradients = [param.grad for param in _params(optimizer)]
    tensors = [*(gradient for gradient in gradients if gradient is not None), *encoded.buffers]
    memories, present = [memory_of(tensor) for tensor in tensors], tuple(gradient is not None for gradient in gradients)
    nbytes = sum(map(len, memories))
    return OptimizerStep(*at, name, nbytes, kinds_of(tensors), present, bytes(encoded.body)), memories


def _take_over(optimizer: torch.optim.Optimizer, item: OptimizerStep, values: Values) -> None:
    """Sets the gradients and options to those of a member's step; raises StateDivergedError if they do not match."""
    params, count = [*_params(optimizer)], sum(item.has_gradient)
    if len(params) != len(item.has_gradient):
        raise StateDivergedError(
            f"its optimizer {item.optimizer!r} has {len(params)} parameters, not the members' number"
        )
    gradients = iter(values[:count])
    for param, has_gradient in zip(params, item.has_gradient, strict=True):
        param.grad = next(gradients).to(param.device) if has_gradient else None
    try:
        options: Any = decode(item.options, values[count:])
    except MalformedPayload as error:
        raise StateDivergedError(f"the options of the optimizer {item.optimizer!r} cannot be read: {error}") from error
    for group, given in zip(optimizer.param_groups, options, strict=True):
        group.update(given)
