"""DiLoCo in an elastic job: each exchange of outer gradients is a round on which the members of a view agree.

An exchange runs in the background on the process group of the view, and its round waits until the exchange completes.
If the view breaks before that, the members of the next view repeat the exchange with the gradients that each of them
has kept, and average over the new set of members. A joining worker receives the outer parameters, the outer optimizer's
state and its sender's inner optimizer state at the beginning of a round, and participates starting with the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.comm.engine.channel import ReduceOp
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import Work
from paceline.train.diloco.diloco import DiLoCo
from paceline.train.diloco.exchanges import ExchangeResult, Exchanges, OuterAverager, Tensors
from paceline.train.elastic.agreement import LOST_MEMBER_ERRORS
from paceline.train.elastic.failpoints import failpoint
from paceline.train.elastic.launcher_connection import LauncherConnection, same_bits_as
from paceline.train.elastic.training_state import Stateful, TrainingState, on_host
from paceline.train.elastic.worker.rounds import Rounds
from paceline.train.module_tensors import broadcast_tensors

_FINAL = -1  # the index of the final exchange, which averages over all members


class DilocoTrainingState(TrainingState):
    """The outer parameters, the state of the outer optimizer, and the state of `others`.

    Each worker has its own parameters, inner optimizer and buffers; a new worker starts with those of a member.
    """

    def __init__(self, diloco: DiLoCo, others: Mapping[str, Stateful]) -> None:
        super().__init__(diloco.outer_module, {**others, "outer optimizer": diloco.outer}, is_replicated=False)
        self._diloco = diloco

    def capture(self) -> dict[str, Any]:
        """Returns the shared state and this worker's own state."""
        return {**super().capture(), "own": on_host(self._diloco.own_state())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replaces this state with one that `capture` returned in another process."""
        super().restore(state)
        self._diloco.take_own_state(state["own"])


@dataclass(frozen=True)
class _RunningSums:
    """The sums that are in progress on the process group of a view."""

    group: ProcessGroup
    tensors: Tensors
    works: list[Work]


class DilocoRounds(Exchanges):
    """Runs the exchanges of `diloco` as rounds.

    `on_round` is called before each round in which new workers may join. It may enter another view.
    """

    def __init__(self, rounds: Rounds, diloco: DiLoCo, on_round: Callable[[], None]) -> None:
        super().__init__()
        self._rounds, self._diloco = rounds, diloco
        self._on_round = on_round
        self._averaging = OuterAverager(diloco.wire)
        self._running: dict[int, _RunningSums] = {}

    def start(self, number: int) -> None:
        """Discards exchanges in progress."""
        super().start(number)
        self._running.clear()

    def begin(self, number: int, offer: Tensors) -> None:
        """Stores the offer and starts to sum it over the members."""
        super().begin(number, offer)
        group = self._rounds.group
        if group is None:
            return
        tensors = [tensor.clone() for tensor in offer]
        try:
            works = self._averaging.begin(group, self._diloco.rhythm.fragment(number), tensors)
        except LOST_MEMBER_ERRORS:
            return  # the round of the exchange detects that the view has broken
        self._running[number] = _RunningSums(group, tensors, works)

    def outcome(self, number: int) -> ExchangeResult:
        """Runs the round that completes an exchange."""
        self._on_round()
        return self._outcome(number)

    def leave(self, begun: range) -> Iterator[ExchangeResult]:
        """Completes the exchanges in progress and yields their results. Workers that join now do not participate."""
        self._on_round()
        for number in begun:
            yield self._outcome(number)

    def mean(self, fragment: int, offer: Tensors) -> Tensors:
        """Runs a round that computes the mean over all members."""
        return self._rounds.agree_on(lambda group: self._mean(group, _FINAL, fragment, offer, None))

    def most(self, number: int) -> int:
        """Runs a round that returns the maximum of `number` over all members."""

        def most(group: ProcessGroup) -> Tensors:
            largest = torch.tensor([number], device="cpu")
            group.all_reduce(largest, ReduceOp.MAX)
            return [largest]

        return int(self._rounds.agree_on(most)[0])

    def copy_from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Runs a round that copies the first member's tensors to all members."""

        def copied(group: ProcessGroup) -> Tensors:
            copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
            broadcast_tensors(copies, group)
            return copies

        for tensor, copy in zip(tensors, self._rounds.agree_on(copied), strict=True):
            tensor.copy_(copy)

    def _outcome(self, number: int) -> ExchangeResult:
        offer, running = self._offers.pop(number, None), self._running.pop(number, None)
        fragment = self._diloco.rhythm.fragment(number)
        mean = self._rounds.agree_on(lambda group: self._mean(group, number, fragment, offer, running))
        return ExchangeResult(number, mean, offer is not None)

    def _mean(
        self, group: ProcessGroup, number: int, fragment: int, offer: Tensors | None, running: _RunningSums | None
    ) -> Tensors:
        """Returns the mean of the members' offers, in separate memory; members without an offer are not counted."""
        parts = self._count(group, number, offer is not None)
        failpoint("mean.weighed")
        if running is not None and running.group is group:
            self._averaging.end(running.works, running.tensors, parts)
            return running.tensors
        tensors = self._diloco.content.blank(fragment) if offer is None else [tensor.clone() for tensor in offer]
        self._averaging.average(group, fragment, tensors, max(parts, 1))
        failpoint("round.computed")
        return tensors

    def _count(self, group: ProcessGroup, number: int, has_offer: bool) -> int:
        """Returns the number of members that have an offer; raises RuntimeError if they run different exchanges."""
        gathered = torch.zeros(group.size(), 2, dtype=torch.int64, device="cpu")
        group.all_gather(list(gathered.unbind()), torch.tensor([number, int(has_offer)], device="cpu"))
        numbers, has = gathered.unbind(1)
        if len(set(numbers.tolist())) > 1:
            raise RuntimeError(
                f"rank {group.rank()}: the workers hold different exchanges of outer gradients: {numbers.tolist()}, by "
                "rank. Call step() after each inner step, and train until `steps` has reached the same number"
            )
        return int(has.sum())


class DilocoLoop:
    """The training loop with DiLoCo. A joining worker receives the entire state in a single step."""

    can_catch_up = False

    def __init__(self, diloco: DiLoCo, others: Mapping[str, Stateful]) -> None:
        if any(other is diloco.inner or other is diloco.outer for other in others.values()):
            raise ValueError(
                "ElasticState got an optimizer of DiLoCo, whose state it already includes; pass only the other objects"
            )
        if diloco.grace_s is not None:
            raise ValueError(
                f"ElasticState got a DiLoCo with grace_s={diloco.grace_s}, but the workers of an elastic job agree on "
                "each exchange, and wait for those that are late; leave grace_s out"
            )
        self._diloco = diloco
        self.registry = DilocoTrainingState(diloco, others)

    def rounds(self, connection: LauncherConnection, on_batch: Callable[[], None]) -> Rounds:
        """Returns the rounds that will average the outer gradients."""
        rounds = Rounds(1, connection, self.registry, lambda _: None)
        self._diloco.exchange_by(DilocoRounds(rounds, self._diloco, on_batch))
        return rounds

    def fingerprint(self) -> str:
        """Returns a string that is equal on two workers if their outer gradients are compatible."""
        facts = {
            "the training loop": "DiLoCo",
            "torch.__version__": torch.__version__,
            "the rhythm of DiLoCo": self._diloco.rhythm,
            "the wire of DiLoCo": self._diloco.wire,
        }
        return same_bits_as(facts | described_tensors(self._diloco.module, with_buffers=False))


def described_tensors(module: nn.Module, *, with_buffers: bool = True) -> dict[str, object]:
    """Returns the shape and dtype of each parameter, and of each buffer, as facts for `same_bits_as`."""
    tensors: dict[str, torch.Tensor] = {f"parameter {name!r}": param for name, param in module.named_parameters()}
    if with_buffers:
        tensors |= {f"buffer {name!r}": buffer for name, buffer in module.named_buffers()}
    return {what: f"of shape {list(tensor.shape)} and {tensor.dtype}" for what, tensor in tensors.items()}
