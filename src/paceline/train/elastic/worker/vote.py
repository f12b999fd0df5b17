"""The vote by which the members of a view commit a round. All members must have the same result and the same state.

The digests in the votes reveal a member whose memory differs from that of the others. They do not reveal a member that
computes wrong sums from correct memory, because all members receive the same wrong sums. To detect such a member, other
members occasionally recompute one of its shards (the *audit*). The audit identifies the faulty member if two others
agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from paceline.comm.group.process_group import ProcessGroup
from paceline.errors import PacelineError
from paceline.train.elastic.agreement import Deal
from paceline.train.elastic.training_state import CAUSES

AUDIT_EVERY = 100  # rounds between two audits
_STRIDE = 0x9E3779B1  # a large odd number that spreads consecutive audits over the shards


class Audit(NamedTuple):
    """The shard that is audited, the rank that owns it, and the ranks that recompute it."""

    shard: int
    owner: int
    others: tuple[int, ...]


def audit_of(round_number: int, deal: Deal, shards: int) -> Audit | None:
    """Returns the audit of a round, or None if the round has none."""
    size = len(deal)
    if size == 1 or round_number % AUDIT_EVERY != AUDIT_EVERY - 1:
        return None
    shard = (round_number * _STRIDE >> 8) % shards
    owner = next(rank for rank, nodes in enumerate(deal) if any(node.first <= shard < node.stop for node in nodes))
    return Audit(shard, owner, tuple(sorted({(owner + 1) % size, (owner + 2) % size} - {owner})))


def suspects(audit: Audit, digests: Sequence[int]) -> tuple[int, ...]:
    """Returns the ranks whose digest of the audited shard differs from the majority's.

    If the digests differ and there is no majority, returns all ranks that computed the shard. `digests` has a 0 for
    each rank that did not compute the shard in this attempt.
    """
    ranks = [rank for rank in (audit.owner, *audit.others) if digests[rank]]
    counted = Counter(digests[rank] for rank in ranks)
    if len(counted) <= 1:
        return ()
    [(most, votes)] = counted.most_common(1)
    if 2 * votes <= len(ranks):
        return tuple(ranks)
    return tuple(rank for rank in ranks if digests[rank] != most)


class DivergenceError(PacelineError):
    """Raised if members in an elastic job hold different results or states, and there is no majority.

    Attributes:
        round: The round in which the difference was detected.
        workers: The names of the workers that differ.
    """

    def __init__(self, message: str, *, round_number: int, workers: tuple[str, ...]) -> None:
        super().__init__(message)
        self.round = round_number
        self.workers = workers


class OutvotedError(PacelineError):
    """Raised if this worker's result or state differs from the majority's. The worker must not continue."""


class OthersOutvotedError(PacelineError):
    """Raised if another member was outvoted and exits. The round is repeated without that member."""


class Ballot(NamedTuple):
    """A member's vote. The digests of the result and of a part of the state must be equal on all members."""

    result: int
    state: int
    ready: int  # the highest view or transfer number on which the member can act; see `ViewGroups.acts_up_to`
    shard_ns: int = 0  # the member's time per shard, or 0 if unknown
    audited: int = 0  # the digest of the audited shard, or 0 if the member did not compute the shard


def vote(
    group: ProcessGroup,
    mine: Ballot,
    round_number: int,
    names: Sequence[str],
    audit: Audit | None = None,
    guests: Collection[int] = (),
) -> list[Ballot]:
    """Compares the members' ballots and returns them by rank. Guests do not count toward the majority.

    Raises:
        OutvotedError: More than half of the members agree with each other, but not with this member.
        OthersOutvotedError: More than half of the members, including this one, agree, but not all of them.
        DivergenceError: The ballots differ, and there is no majority. Raised on every member.
    """
    ballots = [torch.empty(len(mine), dtype=torch.int64, device="cpu") for _ in range(group.size())]
    group.all_gather(ballots, torch.tensor(mine, device="cpu"))
    read = [Ballot(*ballot.tolist()) for ballot in ballots]
    judge(read, group.rank(), round_number, names, guests)
    if audit is not None:
        _judge_audit(read, audit, group.rank(), round_number, names)
    return read


def _judge_audit(ballots: Sequence[Ballot], audit: Audit, rank: int, round_number: int, names: Sequence[str]) -> None:
    wrong = suspects(audit, [ballot.audited for ballot in ballots])
    if not wrong:
        return
    named = tuple(names[suspect] for suspect in wrong)
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
            f"round {round_number}: the {what} differs between the workers {', '.join(names)}, and there is no "
            f"majority. {CAUSES}",
            round_number=round_number,
            workers=tuple(names),
        )
    if (ballots[rank].result, ballots[rank].state) != winner:
        raise OutvotedError(
            f"round {round_number}: the {what} of worker {names[rank]} differs from that of {votes} of {len(counting)} "
            f"workers (outvoted: {', '.join(others)}). {CAUSES}"
        )
    raise OthersOutvotedError(f"round {round_number}: another {what} than that of the majority: {', '.join(others)}")
