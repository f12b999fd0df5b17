"""The vote with which the members of a view commit a round: all must have the same result and the same state.

The audit: once in a while other members compute one member's shard as well, and all must get the same bits.

The digests of the vote show that a member's memory differs from the others'. They do not show a member that computes
wrong sums from right memory, since everybody gets those sums. An audit does, and names it if two others agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from paceline.comm.group.process_group import ProcessGroup
from paceline.errors import PacelineError
from paceline.train.elastic.worker.agreement import Deal

AUDIT_EVERY = 100  # rounds
_STRIDE = 0x9E3779B1  # a large odd number: the shards that are audited one after the other are spread


class Audit(NamedTuple):
    """The shard that is audited, the rank that has it, and the ranks that compute it as well."""

    shard: int
    owner: int
    others: tuple[int, ...]


def audit_of(round_number: int, deal: Deal, shards: int) -> Audit | None:
    """Returns the audit of a round; None if it has none."""
    size = len(deal)
    if size == 1 or round_number % AUDIT_EVERY != AUDIT_EVERY - 1:
        return None
    shard = (round_number * _STRIDE >> 8) % shards
    owner = next(rank for rank, nodes in enumerate(deal) if any(node.first <= shard < node.stop for node in nodes))
    return Audit(shard, owner, tuple(sorted({(owner + 1) % size, (owner + 2) % size} - {owner})))


def suspects(audit: Audit, digests: Sequence[int]) -> tuple[int, ...]:
    """Returns the ranks whose digest of the audited shard is not that of the majority; all of them without a majority.

    Args:
        audit: the audit.
        digests: by rank; 0 on ranks that did not compute the shard in this attempt.
    """
    ranks = [rank for rank in (audit.owner, *audit.others) if digests[rank]]
    seen = [digests[rank] for rank in ranks]
    if len(set(seen)) <= 1:
        return ()
    most = max(set(seen), key=seen.count)
    if 2 * seen.count(most) <= len(seen):
        return tuple(ranks)
    return tuple(rank for rank in ranks if digests[rank] != most)


CAUSES = (
    "The cause is corrupted memory, an operator that is not deterministic, or state that the workers do not share and "
    "ElasticState was not given"
)


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


class OthersOutvotedError(PacelineError):
    """Another member was outvoted and ends: nobody commits the round, to which it has contributed, and it is redone."""


class Ballot(NamedTuple):
    """What a member says in a vote.

    Attributes:
        result, state: digests of its result and of a part of its state, which must be those of all.
        ready: the largest number of a view or transfer that it can act on at once, see `Meeting.acts_up_to`.
        shard_ns: how long a shard takes on it, 0 if it does not know.
        audited: a digest of the shard that is audited in this round, 0 if it did not compute that.
    """

    result: int
    state: int
    ready: int
    shard_ns: int = 0
    audited: int = 0


def vote(
    group: ProcessGroup,
    mine: Ballot,
    round_number: int,
    names: Sequence[str],
    audit: Audit | None = None,
    guests: Collection[int] = (),
) -> list[Ballot]:
    """Compares the members' ballots; returns them by rank. Guests have no part in what the majority is.

    Raises:
        OutvotedError: more than half of the members agree with each other, and not with this one.
        OthersOutvotedError: they agree with this one, and not with all others.
        DivergenceError: there is no such majority; on every member.
    """
    ballots = [torch.empty(len(mine), dtype=torch.int64) for _ in range(group.size())]
    group.all_gather(ballots, torch.tensor(mine))
    read = [Ballot(*ballot.tolist()) for ballot in ballots]
    judge(read, group.rank(), round_number, names, guests)
    if audit is not None:
        _judge_audit(read, audit, group.rank(), round_number, names)
    return read


def _judge_audit(ballots: Sequence[Ballot], audit: Audit, rank: int, round_number: int, names: Sequence[str]) -> None:
    wrong = suspects(audit, [ballot.audited for ballot in ballots])
    if not wrong:
        return
    named = tuple(names[each] for each in wrong)
    if len(wrong) > 1:
        raise DivergenceError(
            f"round {round_number}: the workers {', '.join(named)} computed different sums of shard {audit.shard} from "
            f"the same state. {CAUSES}",
            round_number=round_number,
            workers=named,
        )
    if rank in wrong:
        raise OutvotedError(
            f"round {round_number}: worker {named[0]} computes another sum of shard {audit.shard} than two others do "
            f"from the same state. {CAUSES}"
        )
    raise OthersOutvotedError(f"round {round_number}: worker {named[0]} computes a wrong sum of shard {audit.shard}")


def judge(
    ballots: Sequence[Ballot], rank: int, round_number: int, names: Sequence[str], guests: Collection[int] = ()
) -> None:
    """Raises an error if the ballots of a round differ; see `vote`."""
    if len({(ballot.result, ballot.state) for ballot in ballots}) == 1:
        return
    counting = [ballot for r, ballot in enumerate(ballots) if r not in guests] or ballots
    counted = Counter((ballot.result, ballot.state) for ballot in counting)
    (winner, votes), *_ = counted.most_common()
    others = tuple(names[r] for r, ballot in enumerate(ballots) if (ballot.result, ballot.state) != winner)
    what = "result" if any(ballot.result != winner[0] for ballot in ballots) else "state"
    if 2 * votes <= len(counting):
        raise DivergenceError(
            f"round {round_number}: the {what} differs between the workers {', '.join(names)}, and no majority of them "
            f"agrees. {CAUSES}",
            round_number=round_number,
            workers=tuple(names),
        )
    if (ballots[rank].result, ballots[rank].state) != winner:
        raise OutvotedError(
            f"round {round_number}: the {what} of worker {names[rank]} differs from that of {votes} of {len(counting)} "
            f"workers (outvoted: {', '.join(others)}). {CAUSES}"
        )
    raise OthersOutvotedError(f"round {round_number}: another {what} than that of the majority: {', '.join(others)}")
