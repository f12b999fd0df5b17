"""Looks for NaN and infinity in a rank's own gradients, before they are averaged with those of the others.

NaN that arises in a forward or a backward spreads to the gradients of all layers before it. In most steps it is
therefore enough to look at the first numbers of a few gradients, among them the one that is computed last; all of them
are read now and then. Both happen as often as their measured costs allow.

What is said of gradients that are not finite, and when.
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
    """A tensor that has NaN or infinity among its numbers; `place` is its place in the order of the module."""

    place: int
    name: str
    nans: int
    infs: int
    numel: int

    def describe(self) -> str:
        """Returns the name and how many numbers are odd."""
        return f"{self.name!r} ({self.nans} NaN and {self.infs} infinite of {self.numel} numbers)"


def find_non_finite(named: Iterable[tuple[int, str, torch.Tensor]]) -> list[NonFiniteTensor]:
    """Returns those of the tensors, given with their places and names, that have NaN or infinity."""
    found = []
    for place, name, tensor in named:
        values = numbers_of(tensor)
        if values is not None and (values.is_floating_point() or values.is_complex()):
            nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
            if nans or infs:
                found.append(NonFiniteTensor(place, name, nans, infs, values.numel()))
    return found


def numbers_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the numbers that a tensor holds: all of them, or those of the rows of a sparse one; None without any."""
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
        gradients: the gradients in the order of the module; none if only the parameters are known to be odd.
        count: how many parameters the module trains.
        parameters: the parameters that were not finite before that backward.
    """

    rank: int
    step: int
    gradients: Sequence[NonFiniteTensor]
    count: int
    parameters: Sequence[NonFiniteTensor] = ()

    def text(self, applied: bool) -> str:
        """Returns the message; `applied` says whether an optimizer has made a step with these gradients."""
        if self.parameters:
            return self._spoiled_text()
        last = self.gradients[-1]
        if len(self.gradients) == self.count:
            which = f"of all {self.count} parameters, so the loss or the end of the backward was not finite either"
        else:
            which = f"of {len(self.gradients)} of {self.count} parameters"
        told = "an optimizer has applied their average, which spoils" if applied else "if applied, their average spoils"
        first = self.gradients[0]
        reach = "" if first is last else f", and it spread to {first.describe()}"
        return (
            f"rank {self.rank}: in step {self.step} this rank's own gradients have NaN or infinity: those {which}. "
            f"The backward came first to {last.describe()}{reach}; {told} the parameters of every rank. Look at this "
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
    """Decides which odd gradients are worth a message: the first ones, of the rank where they arose, if they do harm.

    A rank whose gradients are odd because an average brought NaN from another rank stays silent. So does one whose odd
    gradients no optimizer applies, as while a GradScaler looks for its scale. After a message all is silent until a
    backward is finite again.
    """

    def __init__(self) -> None:
        self.pending: NonFiniteGradients | None = None  # nobody has applied it yet
        self._is_told = False
        self._is_received = (
            False  # the averages of the latest backward were odd, and this rank's own gradients were not
        )

    @property
    def is_told(self) -> bool:
        """Returns whether gradients have been odd in every backward since the last message."""
        return self._is_told

    def finite(self, average_is_odd: bool) -> None:
        """Notes a backward in which this rank's gradients were finite."""
        self.pending = None
        self._is_received = average_is_odd
        self._is_told = self._is_told and average_is_odd

    def odd(self, finding: NonFiniteGradients) -> NonFiniteGradients | None:
        """Notes a backward in which they were not, and returns what is to be told at once."""
        if self._is_told or (self._is_received and finding.parameters):
            return None
        earlier, self.pending = self.pending, None
        if not finding.parameters:
            self.pending = finding
            return None
        self._is_told = True
        return finding if earlier is None else earlier  # something that is no optimizer has applied the earlier one

    def applied(self) -> NonFiniteGradients | None:
        """Notes that an optimizer has applied the latest averages, and returns what is to be told."""
        told, self.pending = self.pending, None
        self._is_told = self._is_told or told is not None
        return told


_SOME_TENSORS = 8  # of those that are averaged together, in most steps
_SOME_BYTES = 4096  # of each of them
_ALL_BYTES = 1 << 62
_SOME_SHARE = 0.003  # of the time of a step
_ALL_SHARE = 0.001
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Pieces(NamedTuple):
    """Memory of one type: an address and a length in bytes for each tensor, in turn, and what keeps it.

    Without numbers the memory is a GPU's.
    """

    numbers: Sequence[int]
    dtype: int
    tensors: Sequence[torch.Tensor]

    def has_non_finite(self, nbytes: int) -> bool:
        """Returns whether any of the first `nbytes` of a tensor are NaN or infinity."""
        if self.numbers:
            return _core.first_not_finite(self.numbers, self.dtype, nbytes) >= 0
        return has_non_finite_on_device(self.tensors, nbytes)


class GradientCheck:
    """Notes the first gradients of this rank that are not finite, and warns once an optimizer has applied them.

    Args:
        named: the parameters that are trained, by name and in the order of the module.
        group: the ranks over which gradients are averaged.
    """

    def __init__(self, named: Mapping[str, torch.Tensor], group: ProcessGroup) -> None:
        self.story = NonFiniteHistory()
        self._group = group
        self._params = list(named.values())
        self._names = list(named)
        self._places = {name: at for at, name in enumerate(self._names)}
        self._ids = {id(param) for param in self._params}
        # - When it looks
        self._clock = StepClock()
        self._some = CheckInterval(_SOME_SHARE)
        self._all = CheckInterval(_ALL_SHARE)
        self._bytes = _ALL_BYTES  # how much of each gradient it looks at in this backward, 0 if at none
        # - What it has seen in this backward
        self._cost_s = 0.0
        self._is_odd = False
        self._odd: list[NonFiniteTensor] = []  # what is told of it
        self._seen: list[_Pieces] = []
        OPTIMIZER_STEPS.follow()
        _checks.add(self)

    @property
    def is_looking(self) -> bool:
        """Whether it looks at the gradients of this backward, and then at their averages."""
        return bool(self._bytes)

    @property
    def has_found(self) -> bool:
        """Whether it has seen gradients of this backward that are not finite; then it needs no averages."""
        return self._is_odd

    def look(self, names: Sequence[str], tensors: Sequence[torch.Tensor], pieces: Sequence[int], dtype: int) -> None:
        """Looks at gradients of this rank that are about to be averaged where they are.

        Args:
            names: the names of their parameters, roughly in the order in which the gradients were computed.
            tensors: the gradients; more may follow that belong to no parameter.
            pieces: an address and a length in bytes for each, in turn.
            dtype: the code of their type.
        """
        if not self._bytes:
            return
        started = time.perf_counter()
        chosen: Sequence[int] = range(len(pieces) // 2)
        if self._bytes == _SOME_BYTES:
            chosen = spread_out(len(pieces) // 2)
            pieces = [number for at in chosen for number in pieces[2 * at : 2 * at + 2]]
        if tensors[0].is_cpu:
            seen = _Pieces(pieces, dtype, tensors)
        else:
            seen = _Pieces((), dtype, [tensors[at] for at in chosen])
        self._seen.append(seen)
        if self._has_non_finite([seen]):
            self._note(names, tensors)
        self._cost_s += time.perf_counter() - started

    def look_at(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Looks at gradients of any types, also sparse ones, wherever they lie; they are in the order of the module."""
        if self._bytes:
            started = time.perf_counter()
            if self._has_non_finite(self._chosen(tensors)):
                self._note(names, tensors)
            self._cost_s += time.perf_counter() - started

    def averaged(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes averages that are elsewhere than the gradients were, to look at them when the backward ends."""
        if self._bytes:
            self._seen += self._chosen(tensors)

    def _chosen(self, tensors: Sequence[torch.Tensor]) -> list[_Pieces]:
        """Returns where those tensors are that are looked at in this backward."""
        if self._bytes == _SOME_BYTES:
            tensors = [tensors[-1 - at] for at in spread_out(len(tensors))]
        return _pieces(tensors)

    def _has_non_finite(self, pieces: Sequence[_Pieces]) -> bool:
        return any(each.has_non_finite(self._bytes) for each in pieces)

    def _note(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Finds what is odd in these gradients, and in this backward looks at all that follow."""
        self._is_odd = True
        self._bytes = _ALL_BYTES
        if not self.story.is_told:
            self._odd += find_non_finite(
                (self._places[name], name, each) for name, each in zip(names, tensors, strict=False)
            )

    def forget(self) -> None:
        """Forgets what this backward has shown, since its gradients are not averaged."""
        self._cost_s = 0.0
        self._is_odd = False
        self._odd.clear()
        self._seen.clear()

    def end(self, step: int, averages: Sequence[torch.Tensor] | None = None) -> None:
        """Ends the `step`-th backward: `averages` or, if it is None, what was shown and averaged where it was."""
        now = time.perf_counter()
        self._clock.tick(now)
        if self._bytes:
            if self._is_odd:
                self._judge(step)
            else:
                self.story.finite(
                    average_is_odd=self._has_non_finite(self._seen if averages is None else self._chosen(averages))
                )
            if self.story.pending is None:
                OPTIMIZER_STEPS.ignore(self)
            else:
                OPTIMIZER_STEPS.listen(self)
            pace = self._all if self._bytes == _ALL_BYTES else self._some
            pace.plan(step, self._cost_s + time.perf_counter() - now, self._clock.shortest_s)
        self.forget()
        is_due = self._some.is_due(step + 1)
        self._bytes = _ALL_BYTES if self._all.is_due(step + 1) else _SOME_BYTES if is_due else 0

    def _judge(self, step: int) -> None:
        if self.story.is_told:
            return
        gradients = sorted({each.place: each for each in self._odd}.values(), key=lambda each: each.place)
        parameters = find_non_finite(zip(range(len(self._params)), self._names, self._params, strict=True))
        if gradients:
            note_event(int(EventKind.NOT_FINITE), gradients[-1].name, step, len(gradients))
        finding = NonFiniteGradients(self._group.me.rank, step, gradients, len(self._params), parameters)
        self._tell(self.story.odd(finding), True)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Warns of the gradients that this optimizer has applied."""
        if any(id(param) in self._ids for group in optimizer.param_groups for param in group["params"]):
            OPTIMIZER_STEPS.ignore(self)
            self._tell(self.story.applied(), True)

    def warn_pending(self) -> None:
        """Warns of gradients that nobody has applied, when the program ends: it may have ended because of them."""
        self._tell(self.story.applied(), False)

    def _tell(self, finding: NonFiniteGradients | None, applied: bool) -> None:
        if finding is not None:
            warnings.warn(finding.text(applied), RuntimeWarning, stacklevel=3)


def spread_out(count: int) -> range:
    """Returns a few of the numbers below `count` from the last one down, every n-th.

    n is odd, since weights and biases alternate.

    >>> list(spread_out(3)), list(spread_out(40))
    ([2, 1, 0], [39, 34, 29, 24, 19, 14, 9, 4])
    """
    return range(count - 1, -1, -(count // _SOME_TENSORS | 1))


def _pieces(tensors: Sequence[torch.Tensor]) -> list[_Pieces]:
    """Returns where the tensors' numbers lie, or copies of those with gaps, for each type and kind of device."""
    found: dict[tuple[torch.dtype, bool], list[torch.Tensor]] = {}
    for each in tensors:
        values = numbers_of(each)
        if values is not None:
            found.setdefault((values.dtype, values.is_cpu), []).append(values.contiguous())
    return [
        _Pieces(
            [number for each in dense for number in (each.data_ptr(), each.nbytes)] if is_cpu else (),
            DTYPE_CODES[dtype],
            dense,
        )
        for (dtype, is_cpu), dense in found.items()
    ]


def has_non_finite_on_device(tensors: Sequence[torch.Tensor], nbytes: int) -> bool:
    """Returns whether any of the first `nbytes` of a tensor are NaN or infinity; waits for the device."""
    firsts = [each.detach().reshape(-1)[: nbytes // each.element_size()] for each in tensors]
    known = [each for each in firsts if each.numel() and (each.is_complex() or each.dtype in _FLOATS)]
    return bool(known) and not bool(torch.stack([each.isfinite().all() for each in known]).all())


_checks: weakref.WeakSet[GradientCheck] = weakref.WeakSet()


@atexit.register
def _warn_at_exit() -> None:
    for check in list(_checks):
        check.warn_pending()
