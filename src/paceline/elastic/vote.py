"""The vote with which the members of a view commit a round: all must have the same result and the same state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.errors import PacelineError
from paceline.group.process_group import ProcessGroup


class DivergenceError(PacelineError):
    """Members of an elastic job hold different results or states, and no majority says which of them are right.

    Attributes: `round`, the round in which it was noticed, and `workers`, the names of those that differ.
    """

    def __init__(self, message: str, *, round_number: int, workers: tuple[str, ...]) -> None:
        super().__init__(message)
        self.round = round_number
        self.workers = workers


class OutvotedError(PacelineError):
    """This worker's result or state differs from that of the majority, so that it must not go on."""


class Ballot(NamedTuple):
    """What a member says in a vote: digests of its result and of a part of its state, and the latest view it knows."""

    result: int
    state: int
    heard: int


def vote(group: ProcessGroup, mine: Ballot, round_number: int, names: Sequence[str]) -> int:
    """Compares the members' ballots; returns the latest generation that all of them have heard of.

    Raises:
        OutvotedError: more than half of the members agree with each other, and not with this one.
        DivergenceError: there is no such majority; on every member.
    """
    ballots = [torch.empty(len(mine), dtype=torch.int64) for _ in range(group.size())]
    group.all_gather(ballots, torch.tensor(mine))
    read = [Ballot(*ballot.tolist()) for ballot in ballots]
    judge(read, group.rank(), round_number, names)
    return min(ballot.heard for ballot in read)


def judge(ballots: Sequence[Ballot], rank: int, round_number: int, names: Sequence[str]) -> None:
    """Raises an error if the ballots of a round differ; see `vote`."""
    counted = Counter((ballot.result, ballot.state) for ballot in ballots)
    if len(counted) == 1:
        return
    (winner, votes), *_ = counted.most_common()
    others = tuple(names[r] for r, ballot in enumerate(ballots) if (ballot.result, ballot.state) != winner)
    what = "result" if any(ballot.result != winner[0] for ballot in ballots) else "state"
    if 2 * votes <= len(ballots):
        raise DivergenceError(
            f"round {round_number}: the {what} differs between the workers {', '.join(names)}, and no majority of them "
            "agrees. The cause is corrupted memory, an operator that is not deterministic, or state that the workers "
            "do not share and ElasticState was not given",
            round_number=round_number,
            workers=tuple(names),
        )
    if (ballots[rank].result, ballots[rank].state) != winner:
        raise OutvotedError(
            f"round {round_number}: the {what} of worker {names[rank]} differs from that of {votes} of {len(ballots)} "
            "workers. The cause is corrupted memory, an operator that is not deterministic, or state that the workers "
            f"do not share and ElasticState was not given (outvoted: {', '.join(others)})"
        )
