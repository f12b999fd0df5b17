"""The usual loop in an elastic job: a module whose gradients are averaged, and a loader that is dealt out anew.

A backward is a round (`rounds.py`) in which each member has one value: its gradients, times its weight. A member that
is gone has none, and nobody computes it again. The step is then the mean over the samples of the others, and those of
the member that is gone come again at the end of the epoch. What members have committed is the same everywhere: the
gradients, the buffers and who took part; the loader's position follows from that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from paceline.data.loader import StatefulLoader
from paceline.data.rest import Seat
from paceline.elastic.failpoints import reach
from paceline.elastic.mean import Mean, Part, mean_over, read
from paceline.elastic.rounds import Rounds
from paceline.parallel.ddp.gradients import shares_memory
from paceline.parallel.ddp.module import DistributedDataParallel


class Averaging:
    """Averages the gradients of `model` over the members of each view, and deals `loader` out to them.

    Args:
        model: the module.
        loader: the loader of the batches that it is trained on.
        on_batch: is called when the next batch is about to begin.
    """

    def __init__(
        self, model: DistributedDataParallel, loader: StatefulLoader[object], on_batch: Callable[[], None]
    ) -> None:
        self._model = model
        self._loader = loader
        self._on_batch = on_batch
        self._rounds: Rounds | None = None
        self._name = ""
        self._params, self._buffers_of = model.average_by(self)
        loader.deal_by(self)
        # - The batch that the loop is in
        self._seat: Seat | None = None
        self._counts = True  # the batch is this rank's own, and not one that another rank has as well
        self._rounds_of_batch = 0
        # - The next backward
        self._weight = 1.0
        self._before: tuple[list[torch.Tensor | None], list[torch.Tensor]] | None = None  # gradients and buffers

    def average_by(self, rounds: Rounds, name: str) -> None:
        """Averages over the members of the views of `rounds` from now on, in which this worker has that name."""
        self._rounds, self._name = rounds, name

    # - What the loader asks

    def begin_batch(self) -> Seat:
        """Returns this rank's seat in the next batch."""
        self._on_batch()
        self._rounds_of_batch = 0
        self._seat = Seat(1, 0)
        if self._rounds is not None:
            members = self._rounds.dealings.latest.members
            self._seat = Seat(len(members), members.index(self._name) if self._name in members else None)
        return self._seat

    def handed_out(self, *, counts: bool) -> None:
        """Notes whether this rank's samples of the batch count."""
        self._counts = counts
        reach("batch.dealt")

    def end_batch(self) -> None:
        """Requires that the batch has had a backward.

        Raises:
            RuntimeError: it had none, or one that left parameters without a gradient.
        """
        if self._rounds_of_batch == 0:
            self._model.require_averaged()
            raise RuntimeError(
                f"worker {self._name or '0'}: the loop went on to the next batch, but the last one had no backward, "
                "for which the other ranks wait. Call state.skip_batch() instead of backward, and then "
                "optimizer.step() like the other ranks"
            )

    # - What the module asks

    def set_weight(self, weight: float) -> None:
        """Sets the weight of this rank's next backward.

        Raises:
            ValueError: the weight is negative, infinite or NaN.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"worker {self._name or '0'}: weight is {weight}; it must be finite and not negative")
        self._weight = float(weight)

    def before_forward(self) -> None:
        """Keeps what the forward and its backward change, for the case that they do not count."""
        if self._before is None:
            gradients = [None if param.grad is None else param.grad.clone() for param in self._params]
            self._before = gradients, [buffer.clone() for buffer in self._buffers_of()]

    def average(self) -> None:
        """Replaces the gradients by the mean over the members."""
        self._run(self._weight if self._counts else 0.0)

    def skip(self) -> None:
        """Replaces the gradients by the mean over the other members."""
        self._run(0.0)

    @torch.no_grad()
    def _run(self, weight: float) -> None:
        self._weight = 1.0
        if self._seat is None:
            raise RuntimeError(
                f"worker {self._name or '0'}: backward was called before the loop over the StatefulLoader began; an "
                "elastic job averages only within it"
            )
        batch = (*self._loader.place(), self._rounds_of_batch)
        part = Part(weight, self._seat, batch, self._params, self._buffers_of())
        if self._rounds is None:
            values = mean_over(None, part)
        else:
            values = self._rounds.agree_on(lambda group: mean_over(group, part))
        mean = read(values, part)
        if self._rounds_of_batch == 0:
            self._loader.give_back(rank for rank, took_part in enumerate(mean.took_part) if not took_part)
        self._rounds_of_batch += 1
        self._apply(mean, part)
        reach("mean.applied")

    def _apply(self, mean: Mean, part: Part) -> None:
        before, self._before = self._before, None
        if not mean.counts:
            if before is not None:
                _set_gradients(part, before[0])
                _copy_all(part, before[1])
            return
        for param, value, has_gradient in zip(part.params, mean.gradients, mean.has_gradient, strict=True):
            if not has_gradient:
                param.grad = None
            elif param.grad is None or (shares_memory(param.grad) and not param.grad._is_view()):
                param.grad = torch.empty_like(param).copy_(value)
            else:
                param.grad.copy_(value)
        _copy_all(part, mean.buffers)


def _set_gradients(part: Part, gradients: list[torch.Tensor | None]) -> None:
    for param, gradient in zip(part.params, gradients, strict=True):
        param.grad = gradient


def _copy_all(part: Part, values: list[torch.Tensor]) -> None:
    for buffer, value in zip(part.buffers, values, strict=True):
        buffer.copy_(value)
