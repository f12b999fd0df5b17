"""What is said of gradients that are not finite, and when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OddTensor:
    """A tensor that has NaN or infinity among its numbers; `place` is its place in the order of the module."""

    place: int
    name: str
    nans: int
    infs: int
    numel: int

    def describe(self) -> str:
        """Returns the name and how many numbers are odd."""
        return f"{self.name!r} ({self.nans} NaN and {self.infs} infinite of {self.numel} numbers)"


def find_odd(named: Iterable[tuple[int, str, torch.Tensor]]) -> list[OddTensor]:
    """Returns those of the tensors, given with their places and names, that have NaN or infinity."""
    found = []
    for place, name, tensor in named:
        values = numbers_of(tensor)
        if values is not None and (values.is_floating_point() or values.is_complex()):
            nans, infs = int(values.isnan().sum()), int(values.isinf().sum())
            if nans or infs:
                found.append(OddTensor(place, name, nans, infs, values.numel()))
    return found


def numbers_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the numbers that a tensor holds: all of them, or those of the rows of a sparse one; None without any."""
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values._values()
    return values if values.layout is torch.strided and not values.is_meta and values.numel() else None


@dataclass(frozen=True)
class Finding:
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
    gradients: Sequence[OddTensor]
    count: int
    parameters: Sequence[OddTensor] = ()

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


class Story:
    """Decides which odd gradients are worth a message: the first ones, of the rank where they arose, if they do harm.

    A rank whose gradients are odd because an average brought NaN from another rank stays silent. So does one whose odd
    gradients no optimizer applies, as while a GradScaler looks for its scale. After a message all is silent until a
    backward is finite again.
    """

    def __init__(self) -> None:
        self.pending: Finding | None = None  # nobody has applied it yet
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

    def odd(self, finding: Finding) -> Finding | None:
        """Notes a backward in which they were not, and returns what is to be told at once."""
        if self._is_told or (self._is_received and finding.parameters):
            return None
        earlier, self.pending = self.pending, None
        if not finding.parameters:
            self.pending = finding
            return None
        self._is_told = True
        return finding if earlier is None else earlier  # something that is no optimizer has applied the earlier one

    def applied(self) -> Finding | None:
        """Notes that an optimizer has applied the latest averages, and returns what is to be told."""
        told, self.pending = self.pending, None
        self._is_told = self._is_told or told is not None
        return told
