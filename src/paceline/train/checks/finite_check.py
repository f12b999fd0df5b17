"""GradientCheck: detects NaN and infinity in a rank's own gradients, before they are averaged over the ranks.

A NaN that arises in a forward or a backward spreads to the gradients of all earlier layers. In most steps it is
therefore enough to read the first numbers of a few gradients, among them the one that is computed last; all of them
are read now and then. The measured costs determine how often.
"""

from __future__ import annotations

import atexit
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline import _core
from paceline.comm.engine.codes import DTYPE_CODES
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.record.layout import EventKind
from paceline.comm.record.spans import note_event
from paceline.train.checks.optimizer_steps import OPTIMIZER_STEPS, CheckInterval, StepClock


@dataclass(frozen=True)
class NonFiniteTensor:
    """A tensor that contains NaN or infinity; `position` is that in the order of the module."""

    position: int
    name: str
    nans: int
    infs: int
    numel: int

    def describe(self) -> str:
        """Returns the name and the counts of NaN and infinity."""
        return f"{self.name!r} ({self.nans} NaN and {self.infs} infinite of {self.numel} numbers)"


def find_non_finite(named: Iterable[tuple[int, str, torch.Tensor]]) -> list[NonFiniteTensor]:
    """Returns the tensors that contain NaN or infinity, given triples of a position, a name and a tensor."""
    found = []
    for position, name, tensor in named:
        values = numbers_of(tensor)
        if values is not None and (values.is_floating_point() or values.is_complex()):
            nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
            if nans or infs:
                found.append(NonFiniteTensor(position, name, nans, infs, values.numel()))
    return found


def numbers_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the values of a tensor, or of the rows of a sparse one; None if it has no values."""
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values._values()
    return values if values.layout is torch.strided and not values.is_meta and values.numel() else None


@dataclass(frozen=True)
class NonFiniteGradients:
    """The gradients of one backward on one rank that are not finite.

    Attributes:
        rank: the rank.
        step: the number of the backward, among those whose gradients were averaged.
        gradients: the gradients that are not finite, in the order of the module; empty if only parameters were found.
        count: the number of parameters that the module trains.
        parameters: the parameters that were not finite before that backward.
    """

    rank: int
    step: int
    gradients: Sequence[NonFiniteTensor]
    count: int
    parameters: Sequence[NonFiniteTensor] = ()

    def text(self, applied: bool) -> str:
        """Returns the text of the warning.

        Args:
            applied: whether an optimizer has made a step with these gradients.
        """
        if self.parameters:
            return self._spoiled_text()
        last = self.gradients[-1]
        if len(self.gradients) == self.count:
            which = f"of all {self.count} parameters, so the loss or the end of the backward was not finite either"
        else:
            which = f"of {len(self.gradients)} of {self.count} parameters"
        effect = (
            "an optimizer has applied their average, which spoils" if applied else "if applied, their average spoils"
        )
        first = self.gradients[0]
        reach = "" if first is last else f", and it spread to {first.describe()}"
        return (
            f"rank {self.rank}: in step {self.step} this rank's own gradients have NaN or infinity: those {which}. "
            f"The backward came first to {last.describe()}{reach}; {effect} the parameters of every rank. Look at this "
            "rank's batch of that step, and run it again under torch.autograd.set_detect_anomaly(True)"
        )

    def _spoiled_text(self) -> str:
        return (
            f"rank {self.rank}: {len(self.parameters)} of {self.count} parameters had NaN or infinity before the "
            f"backward of step {self.step}, first {self.parameters[0].describe()}, and no gradient that this rank "
            "looked at had brought them in. See whether another rank names one; otherwise a step of the optimizer did, "
            "or something else that writes to parameters. Check the learning rate, and what was loaded"
        )


class NonFiniteHistory:
    """A state machine that decides which findings cause a warning: the first ones, on the rank where they arose.

    There is no warning on a rank whose gradients are not finite because an average brought NaN from another rank, nor
    while no optimizer applies the gradients, as when a GradScaler searches for its scale. After a warning there is no
    other one until a backward was finite.
    """

    def __init__(self) -> None:
        self.pending: NonFiniteGradients | None = None  # a finding that no optimizer has applied yet
        self._has_warned = False
        self._is_received = False  # the averages of the latest backward were not finite, but this rank's gradients were

    @property
    def has_warned(self) -> bool:
        """Returns whether no backward has been finite since the last warning."""
        return self._has_warned

    def finite(self, average_is_finite: bool) -> None:
        """Records a backward in which this rank's gradients were finite."""
        self.pending = None
        self._is_received = not average_is_finite
        self._has_warned = self._has_warned and not average_is_finite

    def not_finite(self, finding: NonFiniteGradients) -> NonFiniteGradients | None:
        """Records a backward in which they were not, and returns the finding to warn of at once, if any."""
        if self._has_warned or (self._is_received and finding.parameters):
            return None
        earlier, self.pending = self.pending, None
        if not finding.parameters:
            self.pending = finding
            return None
        self._has_warned = True
        return finding if earlier is None else earlier  # the earlier one was applied, but not by an optimizer

    def applied(self) -> NonFiniteGradients | None:
        """Records that an optimizer has applied the latest averages, and returns the finding to warn of, if any."""
        finding, self.pending = self.pending, None
        self._has_warned = self._has_warned or finding is not None
        return finding


_SOME_TENSORS = 8  # the number of tensors that a partial check reads, of those that are averaged together
_SOME_BYTES = 4096  # the number of bytes that it reads of each
_ALL_BYTES = 1 << 62
_SOME_SHARE = 0.003  # the share of a step's time that partial checks may take
_ALL_SHARE = 0.001  # the share that complete checks may take
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Pieces(NamedTuple):
    """Memory of one dtype: the address and the length in bytes of each tensor, alternating, and the tensors.

    Without addresses the memory is a GPU's.
    """

    numbers: Sequence[int]
    dtype: int
    tensors: Sequence[torch.Tensor]

    def has_non_finite(self, nbytes: int) -> bool:
        """Returns whether the first `nbytes` of any tensor contain NaN or infinity."""
        if self.numbers:
            return _core.first_not_finite(self.numbers, self.dtype, nbytes) >= 0
        return has_non_finite_on_device(self.tensors, nbytes)


class GradientCheck:
    """Detects the first gradients of this rank that are not finite, and warns once an optimizer has applied them.

    Args:
        named: the trained parameters by name, in the order of the module.
        group: the ranks over which gradients are averaged.
    """

    def __init__(self, named: Mapping[str, torch.Tensor], group: ProcessGroup) -> None:
        self.history = NonFiniteHistory()
        self._group = group
        self._params = list(named.values())
        self._names = list(named)
        self._positions = {name: position for position, name in enumerate(self._names)}
        self._ids = {id(param) for param in self._params}
        # - The intervals of partial and complete checks
        self._clock = StepClock()
        self._some = CheckInterval(_SOME_SHARE)
        self._all = CheckInterval(_ALL_SHARE)
        self._bytes = _ALL_BYTES  # the bytes of each gradient that are read in this backward; 0 for no check
        # - The findings of this backward
        self._cost_s = 0.0
        self._has_found = False
        self._found: list[NonFiniteTensor] = []  # those to be named in a warning
        self._seen: list[_Pieces] = []
        OPTIMIZER_STEPS.follow()
        _checks.add(self)

    @property
    def is_looking(self) -> bool:
        """Whether the gradients of this backward, and then their averages, are checked."""
        return bool(self._bytes)

    @property
    def has_found(self) -> bool:
        """Whether a gradient of this backward was not finite; then averages are not needed."""
        return self._has_found

    def look(self, names: Sequence[str], tensors: Sequence[torch.Tensor], pieces: Sequence[int], dtype: int) -> None:
        """Checks gradients of this rank that are about to be averaged in place.

        Args:
            names: the names of their parameters, roughly in the order in which the gradients were computed.
            tensors: the gradients; tensors that belong to no parameter may follow.
            pieces: the address and the length in bytes of each tensor, alternating.
            dtype: the code of the tensors' dtype.
        """
        if not self._bytes:
            return
        started = time.perf_counter()
        chosen: Sequence[int] = range(len(pieces) // 2)
        if self._bytes == _SOME_BYTES:
            chosen = spread_out(len(pieces) // 2)
            pieces = [number for index in chosen for number in pieces[2 * index : 2 * index + 2]]
        if tensors[0].is_cpu:
            seen = _Pieces(pieces, dtype, tensors)
        else:
            seen = _Pieces((), dtype, [tensors[index] for index in chosen])
        self._seen.append(seen)
        if self._has_non_finite([seen]):
            self._note(names, tensors)
        self._cost_s += time.perf_counter() - started

    def look_at(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Checks gradients of any dtypes and layouts, also sparse ones, given in the order of the module."""
        if self._bytes:
            started = time.perf_counter()
            if self._has_non_finite(self._chosen(tensors)):
                self._note(names, tensors)
            self._cost_s += time.perf_counter() - started

    def averaged(self, tensors: Sequence[torch.Tensor]) -> None:
        """Receives averages that are not in the gradients' memory, to be checked when the backward ends."""
        if self._bytes:
            self._seen += self._chosen(tensors)

    def _chosen(self, tensors: Sequence[torch.Tensor]) -> list[_Pieces]:
        """Returns the memory of the tensors that are checked in this backward."""
        if self._bytes == _SOME_BYTES:
            tensors = [tensors[-1 - index] for index in spread_out(len(tensors))]
        return _pieces(tensors)

    def _has_non_finite(self, pieces: Sequence[_Pieces]) -> bool:
        return any(piece.has_non_finite(self._bytes) for piece in pieces)

    def _note(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Records which of these gradients are not finite; all further gradients of this backward are checked."""
        self._has_found = True
        self._bytes = _ALL_BYTES
        if not self.history.has_warned:
            self._found += find_non_finite(
                (self._positions[name], name, tensor) for name, tensor in zip(names, tensors, strict=False)
            )

    def forget(self) -> None:
        """Discards the findings of this backward, whose gradients are not averaged."""
        self._cost_s = 0.0
        self._has_found = False
        self._found.clear()
        self._seen.clear()

    def end(self, step: int, averages: Sequence[torch.Tensor] | None = None) -> None:
        """Completes a backward.

        Args:
            step: the number of the backward.
            averages: the averages; None if they are in the memory of the gradients that were checked.
        """
        now = time.perf_counter()
        self._clock.tick(now)
        if self._bytes:
            if self._has_found:
                self._judge(step)
            else:
                pieces = self._seen if averages is None else self._chosen(averages)
                self.history.finite(average_is_finite=not self._has_non_finite(pieces))
            if self.history.pending is None:
                OPTIMIZER_STEPS.ignore(self)
            else:
                OPTIMIZER_STEPS.listen(self)
            pace = self._all if self._bytes == _ALL_BYTES else self._some
            pace.plan(step, self._cost_s + time.perf_counter() - now, self._clock.shortest_s)
        self.forget()
        is_due = self._some.is_due(step + 1)
        self._bytes = _ALL_BYTES if self._all.is_due(step + 1) else _SOME_BYTES if is_due else 0

    def _judge(self, step: int) -> None:
        if self.history.has_warned:
            return
        by_position = {found.position: found for found in self._found}
        gradients = [by_position[position] for position in sorted(by_position)]
        parameters = find_non_finite(zip(range(len(self._params)), self._names, self._params, strict=True))
        if gradients:
            note_event(int(EventKind.NOT_FINITE), gradients[-1].name, step, len(gradients))
        finding = NonFiniteGradients(self._group.me.rank, step, gradients, len(self._params), parameters)
        self._warn(self.history.not_finite(finding), applied=True)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Warns of the gradients that this optimizer has applied."""
        if any(id(param) in self._ids for group in optimizer.param_groups for param in group["params"]):
            OPTIMIZER_STEPS.ignore(self)
            self._warn(self.history.applied(), applied=True)

    def warn_pending(self) -> None:
        """Warns of gradients that no optimizer has applied; called at exit, for which they may be the reason."""
        self._warn(self.history.applied(), applied=False)

    def _warn(self, finding: NonFiniteGradients | None, *, applied: bool) -> None:
        if finding is not None:
            warnings.warn(finding.text(applied), RuntimeWarning, stacklevel=3)


def spread_out(count: int) -> range:
    """Returns every n-th number below `count`, from the last one down; n is odd, since weights and biases alternate.

    >>> list(spread_out(3)), list(spread_out(40))
    ([2, 1, 0], [39, 34, 29, 24, 19, 14, 9, 4])
    """
    return range(count - 1, -1, -(count // _SOME_TENSORS | 1))


def _pieces(tensors: Sequence[torch.Tensor]) -> list[_Pieces]:
    """Returns the memory of the tensors, or of contiguous copies of strided ones, by dtype and kind of device."""
    found: dict[tuple[torch.dtype, bool], list[torch.Tensor]] = {}
    for tensor in tensors:
        values = numbers_of(tensor)
        if values is not None:
            found.setdefault((values.dtype, values.is_cpu), []).append(values.contiguous())
    return [
        _Pieces(
            [number for values in dense for number in (values.data_ptr(), values.nbytes)] if is_cpu else (),
            DTYPE_CODES[dtype],
            dense,
        )
        for (dtype, is_cpu), dense in found.items()
    ]


def has_non_finite_on_device(tensors: Sequence[torch.Tensor], nbytes: int) -> bool:
    """Returns whether the first `nbytes` of any tensor contain NaN or infinity; waits for the device."""
    starts = [tensor.detach().reshape(-1)[: nbytes // tensor.element_size()] for tensor in tensors]
    floats = [values for values in starts if values.numel() and (values.is_complex() or values.dtype in _FLOATS)]
    return bool(floats) and not bool(torch.stack([values.isfinite().all() for values in floats]).all())


_checks: weakref.WeakSet[GradientCheck] = weakref.WeakSet()


@atexit.register
def _warn_at_exit() -> None:
    for check in list(_checks):
        check.warn_pending()
