"""GradientCheck: detects NaN and infinity in a rank's own gradients, before they are averaged over the ranks.

A NaN in a forward pass or a backward pass spreads to the gradients of all earlier layers. Most steps therefore run only
a partial check, which reads the first bytes of a few gradients, including the one that is computed last. A complete
check reads all gradients; it runs at longer intervals that depend on its measured cost.

On a device, every check examines all gradients. The host reads the results in a later step and never waits for the
device (`DeviceOutcome`).
"""

from __future__ import annotations

import atexit
import contextlib
import math
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline import _core
from paceline.comm.engine.adapters.device_streams import is_capturing
from paceline.comm.engine.channel import DTYPE_CODES
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.record.layout import EventKind
from paceline.comm.record.spans import note_event
from paceline.train.checks.device_values import DeviceNorms, HostCopy, LabeledNorms
from paceline.train.checks.optimizer_steps import OPTIMIZER_STEPS, CheckInterval, StepClock


@dataclass(frozen=True)
class NonFiniteTensor:
    """A tensor that contains NaN or infinity; `position` is its index in the module's order.

    On a device, NaN and infinity are only detected, not counted (`is_counted` is False). In this case either `nans` or
    `infs` is 1, and the other is 0.
    """

    position: int
    name: str
    nans: int
    infs: int
    numel: int
    is_counted: bool = True

    def describe(self) -> str:
        """Formats the name and the counts of NaN and infinity as text."""
        if not self.is_counted:
            return f"{self.name!r} (with {'NaN' if self.nans else 'infinity'} among {self.numel} numbers)"
        return f"{self.name!r} ({self.nans} NaN and {self.infs} infinite of {self.numel} numbers)"


def find_non_finite(named: Iterable[tuple[int, str, torch.Tensor]]) -> list[NonFiniteTensor]:
    """Returns the tensors that contain NaN or infinity; `named` yields triples of position, name and tensor."""
    found = []
    for position, name, tensor in named:
        values = numbers_of(tensor)
        if values is not None and (values.is_floating_point() or values.is_complex()):
            nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
            if nans or infs:
                found.append(NonFiniteTensor(position, name, nans, infs, values.numel()))
    return found


def numbers_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a tensor's values (for a sparse tensor, the values of its rows), or None if it has no values."""
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values._values()
    return values if values.layout is torch.strided and not values.is_meta and values.numel() else None


@dataclass(frozen=True)
class NonFiniteGradients:
    """The non-finite gradients from one backward pass on one rank, in the module's order.

    Attributes:
        rank: the rank that computed the gradients.
        step: the index of the backward pass; only backward passes whose gradients were averaged are counted.
        gradients: the gradients that are not finite; empty if only parameters are not finite.
        count: the number of trained parameters in the module.
        parameters: the parameters that were already non-finite before the backward pass.
    """

    rank: int
    step: int
    gradients: Sequence[NonFiniteTensor]
    count: int
    parameters: Sequence[NonFiniteTensor] = ()

    def text(self, applied: bool) -> str:
        """Returns the text of the warning; `applied` is True if an optimizer has applied these gradients."""
        if self.parameters:
            return self._spoiled_text()
        last = self.gradients[-1]
        if len(self.gradients) == self.count:
            which = f"of all {self.count} parameters, so the loss or the end of the backward was not finite either"
        else:
            which = f"of {len(self.gradients)} of {self.count} parameters"
        effect = (
            "an optimizer has applied their average, which corrupts"
            if applied
            else "if applied, their average corrupts"
        )
        first = self.gradients[0]
        reach = "" if first is last else f", and it spread to {first.describe()}"
        return (
            f"rank {self.rank}: in step {self.step} this rank's own gradients have NaN or infinity: those {which}. The "
            f"backward pass first reached {last.describe()}{reach}; {effect} the parameters of every rank. Look at "
            "this rank's batch of that step, and run it again under torch.autograd.set_detect_anomaly(True)"
        )

    def _spoiled_text(self) -> str:
        return (
            f"rank {self.rank}: {len(self.parameters)} of {self.count} parameters had NaN or infinity before the "
            f"backward of step {self.step}, first {self.parameters[0].describe()}, and no gradient that this rank "
            "checked had introduced them. Check whether another rank reports one; otherwise an optimizer step did, or "
            "other code that writes to parameters. Check the learning rate, and what was loaded"
        )


class NonFiniteHistory:
    """A state machine that limits warnings to the first non-finite values, on the rank that computed them.

    A rank does not warn about non-finite values that it received from another rank in an average. It also does not warn
    while no optimizer applies the gradients, for example while a GradScaler searches for its scale. After a warning, it
    does not warn again until a backward pass has finite gradients.
    """

    def __init__(self) -> None:
        self.pending: NonFiniteGradients | None = None  # a finding whose gradients no optimizer has applied yet
        self.has_warned = False  # whether a warning was issued since the last backward pass with finite gradients
        self._is_received = False  # whether the latest averages, but not this rank's gradients, were non-finite

    def finite(self, average_is_finite: bool) -> None:
        """Records a backward pass in which this rank's gradients were finite."""
        self.pending = None
        self._is_received = not average_is_finite
        self.has_warned = self.has_warned and not average_is_finite

    def not_finite(self, finding: NonFiniteGradients) -> NonFiniteGradients | None:
        """Records a backward pass with non-finite gradients; returns the finding if a warning is now due, or None."""
        if self.has_warned or (self._is_received and finding.parameters):
            return None
        earlier, self.pending = self.pending, None
        if not finding.parameters:
            self.pending = finding
            return None
        self.has_warned = True
        return finding if earlier is None else earlier  # `earlier` made the parameters non-finite

    def applied(self) -> NonFiniteGradients | None:
        """Records that an optimizer has applied the latest averages; returns the finding to warn about, or None."""
        finding, self.pending = self.pending, None
        self.has_warned = self.has_warned or finding is not None
        return finding


_SOME_TENSORS = 8  # the approximate number of tensors that a partial check reads in each bucket
_SOME_BYTES = 4096  # the number of bytes that a partial check reads from each tensor
_ALL_BYTES = 1 << 62
_SOME_SHARE = 0.003  # the share of training time that partial checks may take
_ALL_SHARE = 0.001  # the share of training time that complete checks may take
_DEVICE_BYTES_PER_S = 1e12  # the assumed memory bandwidth of a device


class _Pieces(NamedTuple):
    """CPU tensors of one dtype; `numbers` alternates between each tensor's address and its length in bytes."""

    numbers: Sequence[int]
    dtype: int
    tensors: Sequence[torch.Tensor]


class DeviceOutcome:
    """Holds the norms of gradients, averages and parameters from one step until the device has computed them."""

    def __init__(self, step: int, copies: Sequence[LabeledNorms]) -> None:
        self.step = step
        self.is_applied = False  # whether an optimizer has applied the averages
        self._copies = copies  # the norms on each device, labeled with the tensors' roles and positions
        self._found_infs: list[HostCopy] = []  # one per optimizer step; nonzero if the step was skipped

    def note_step(self, found_inf: torch.Tensor | None) -> None:
        """Records an optimizer step; a nonzero `found_inf` means that the optimizer skipped the step."""
        if found_inf is None:
            self.is_applied = True
        else:
            self._found_infs.append(HostCopy(found_inf.detach().reshape(-1)))

    def is_complete(self) -> bool:
        """Returns True if the numbers can be read without waiting for the device."""
        return all(copy.is_complete() for copy in (*(norms.norms for norms in self._copies), *self._found_infs))

    def read(self) -> dict[str, dict[int, float]]:
        """Returns the norms that are not finite, by role and position."""
        self.is_applied = self.is_applied or any(not any(copy.read()) for copy in self._found_infs)
        found: dict[str, dict[int, float]] = {"gradient": {}, "average": {}, "parameter": {}}
        for copy in self._copies:
            for (role, position), norm in zip(copy.labels, copy.norms.read(), strict=True):
                if not math.isfinite(norm):
                    found[role][position] = norm
        return found


class GradientCheck:
    """Detects the first non-finite gradients on this rank, and warns when an optimizer has applied them.

    `named` contains the trained parameters, in the module's order.
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
        self._bytes = _ALL_BYTES  # the bytes to read from each gradient in this backward pass; 0 for no check
        # - The findings from this backward pass
        self._cost_s = 0.0
        self.has_found = False  # whether a non-finite gradient was found; if so, averages need not be checked
        self._found: list[NonFiniteTensor] = []  # non-finite gradients to list in a warning
        self._seen: list[_Pieces] = []
        # - Findings on devices
        self._norms = DeviceNorms()
        self._seen_on_device: list[torch.Tensor] = []
        self._outcomes: list[DeviceOutcome] = []
        OPTIMIZER_STEPS.follow()
        _checks.add(self)

    @property
    def is_looking(self) -> bool:
        """Whether the gradients of the current backward pass and their averages are checked."""
        return bool(self._bytes)

    def look(self, names: Sequence[str], tensors: Sequence[torch.Tensor], pieces: Sequence[int], dtype: int) -> None:
        """Checks this rank's gradients before they are averaged in place.

        Args:
            names: the names of the gradients' parameters, roughly in the order in which the gradients were computed.
            tensors: the gradients, all on one device, possibly followed by tensors that do not belong to a parameter.
            pieces: a flat sequence that contains the address and the length in bytes of each tensor.
            dtype: the code of the tensors' dtype.
        """
        if not self._bytes:
            return
        started = time.perf_counter()
        if tensors[0].is_cpu:
            if self._bytes == _SOME_BYTES:
                chosen = spread_out(len(pieces) // 2)
                pieces = [number for index in chosen for number in pieces[2 * index : 2 * index + 2]]
            seen = _Pieces(pieces, dtype, tensors)
            self._seen.append(seen)
            if self._has_non_finite([seen]):
                self._note(zip(names, tensors, strict=False))
        elif not is_capturing(tensors[0].device):
            self._look_on_device(zip(names, tensors, strict=False))
            self._seen_on_device += tensors  # the same memory is checked again after averaging
        self._cost_s += time.perf_counter() - started

    def look_at(self, named: Mapping[str, torch.Tensor]) -> None:
        """Checks gradients with any dtypes and layouts, including sparse ones, in the module's order."""
        if not self._bytes:
            return
        started = time.perf_counter()
        on_cpu = {name: tensor for name, tensor in named.items() if tensor.is_cpu}
        on_device = [(name, tensor) for name, tensor in named.items() if not tensor.is_cpu]
        if on_device and not is_capturing(on_device[0][1].device):
            self._look_on_device(on_device)
        if self._has_non_finite(self._chosen(list(on_cpu.values()))):
            self._note(on_cpu.items())
        self._cost_s += time.perf_counter() - started

    def averaged(self, tensors: Sequence[torch.Tensor]) -> None:
        """Makes `end` also check these averages, which are stored outside the gradients' memory."""
        if self._bytes:
            self._seen += self._chosen([tensor for tensor in tensors if tensor.is_cpu])
            self._seen_on_device += [tensor for tensor in tensors if not tensor.is_cpu]

    def _look_on_device(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        gradients = ((self._positions[name], numbers_of(tensor)) for name, tensor in named)
        self._norms.add("gradient", gradients)

    def _chosen(self, tensors: Sequence[torch.Tensor]) -> list[_Pieces]:
        """Selects the tensors to read in the check of the current backward pass."""
        if self._bytes == _SOME_BYTES:
            tensors = [tensors[-1 - index] for index in spread_out(len(tensors))]
        return _pieces(tensors)

    def _has_non_finite(self, pieces: Sequence[_Pieces]) -> bool:
        return any(_core.first_not_finite(piece.numbers, piece.dtype, self._bytes) >= 0 for piece in pieces)

    def _note(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Records the non-finite gradients, and enables the complete check for the rest of this backward pass."""
        self.has_found = True
        self._bytes = _ALL_BYTES
        if not self.history.has_warned:
            self._found += find_non_finite((self._positions[name], name, tensor) for name, tensor in named)

    def forget(self) -> None:
        """Discards the findings from the current backward pass."""
        self._cost_s = 0.0
        self.has_found = False
        self._found.clear()
        self._seen.clear()
        self._norms.clear()
        self._seen_on_device.clear()

    def end(self, step: int, averages: Sequence[torch.Tensor] | None = None) -> None:
        """Completes backward pass `step`.

        `averages` is None if the averages are in the memory of the checked gradients.
        """
        now = time.perf_counter()
        self._clock.tick(now)
        self._judge_outcomes()
        if self._bytes:
            on_device = bool(self._norms)
            self._end_on_device(step, averages)
            on_cpu = None if averages is None else [average for average in averages if average.is_cpu]
            if self.has_found:
                self._judge(step)
            elif self._seen or on_cpu or not on_device:
                pieces = self._seen if on_cpu is None else self._chosen(on_cpu)
                self.history.finite(average_is_finite=not self._has_non_finite(pieces))
            pace = self._all if self._bytes == _ALL_BYTES else self._some
            pace.plan(step, self._cost_s + time.perf_counter() - now, self._clock.shortest_s)
        self._follow_steps()
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

    def _end_on_device(self, step: int, averages: Sequence[torch.Tensor] | None) -> None:
        """Enqueues norm computations for averages and parameters, followed by copies of the norms to the host."""
        if not self._norms:
            return
        seen = self._seen_on_device if averages is None else [average for average in averages if not average.is_cpu]
        self._norms.add("average", enumerate(map(numbers_of, seen)))
        on_device = ((at, param) for at, param in enumerate(self._params) if not param.is_cpu and not param.is_meta)
        self._norms.add("parameter", on_device)
        self._cost_s += self._norms.nbytes / _DEVICE_BYTES_PER_S
        self._outcomes.append(DeviceOutcome(step, self._norms.enqueue_copies()))

    def _judge_outcomes(self) -> None:
        """Evaluates the steps whose norms are available, in the order of the steps."""
        if self._outcomes and any(is_capturing(param.device) for param in self._params[:1]):
            return
        while self._outcomes and self._outcomes[0].is_complete():
            outcome = self._outcomes.pop(0)
            found = outcome.read()
            if not found["gradient"]:
                self.history.finite(average_is_finite=not found["average"])
                continue
            gradients, parameters = (
                [self._found_on_device(*at) for at in sorted(found[role].items())] for role in ("gradient", "parameter")
            )
            note_event(int(EventKind.NOT_FINITE), gradients[-1].name, outcome.step, len(gradients))
            finding = NonFiniteGradients(self._group.me.rank, outcome.step, gradients, len(self._params), parameters)
            self._warn(self.history.not_finite(finding), applied=True)
            if outcome.is_applied:
                self._warn(self.history.applied(), applied=True)

    def _found_on_device(self, position: int, norm: float) -> NonFiniteTensor:
        is_nan = math.isnan(norm)
        numel = self._params[position].numel()
        return NonFiniteTensor(position, self._names[position], int(is_nan), int(not is_nan), numel, is_counted=False)

    def _follow_steps(self) -> None:
        if self._outcomes or self.history.pending is not None:
            OPTIMIZER_STEPS.listen(self)
        else:
            OPTIMIZER_STEPS.ignore(self)

    def after_step(self, optimizer: torch.optim.Optimizer, found_inf: torch.Tensor | None) -> None:
        """Warns about non-finite gradients that this optimizer has applied; see `StepListener`."""
        if any(id(param) in self._ids for group in optimizer.param_groups for param in group["params"]):
            for outcome in self._outcomes:
                outcome.note_step(found_inf)
            if found_inf is None:
                self._warn(self.history.applied(), applied=True)
            self._follow_steps()

    def warn_pending(self) -> None:
        """Warns at exit about non-finite gradients that were not applied, because they may have caused the exit."""
        with contextlib.suppress(RuntimeError):  # a device may have failed
            self._judge_outcomes()
        self._warn(self.history.applied(), applied=False)

    def _warn(self, finding: NonFiniteGradients | None, *, applied: bool) -> None:
        if finding is not None:
            warnings.warn(finding.text(applied), RuntimeWarning, stacklevel=3)


def spread_out(count: int) -> range:
    """Returns every n-th number below `count` in descending order; n is odd, because weights and biases alternate.

    >>> list(spread_out(3)), list(spread_out(40))
    ([2, 1, 0], [39, 34, 29, 24, 19, 14, 9, 4])
    """
    return range(count - 1, -1, -(count // _SOME_TENSORS | 1))


def _pieces(tensors: Sequence[torch.Tensor]) -> list[_Pieces]:
    """Groups the memory of CPU tensors by dtype; tensors that are not contiguous are copied."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        values = numbers_of(tensor)
        if values is not None:
            found.setdefault(values.dtype, []).append(values.contiguous())
    return [
        _Pieces(
            [number for values in dense for number in (values.data_ptr(), values.nbytes)], DTYPE_CODES[dtype], dense
        )
        for dtype, dense in found.items()
    ]


_checks: weakref.WeakSet[GradientCheck] = weakref.WeakSet()


@atexit.register
def _warn_at_exit() -> None:
    for check in list(_checks):
        check.warn_pending()
