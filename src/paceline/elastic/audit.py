"""The audit: once in a while other members compute one member's shard as well, and all must get the same bits.

The digests of the vote show that a member's memory differs from the others'. They do not show a member that computes
wrong sums from right memory, since everybody gets those sums. An audit does, and names it if two others agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.elastic.agreement import Deal

EVERY = 100  # rounds
_STRIDE = 0x9E3779B1  # a large odd number: the shards that are audited one after the other are spread


class Audit(NamedTuple):
    """The shard that is audited, the rank that has it, and the ranks that compute it as well."""

    shard: int
    owner: int
    others: tuple[int, ...]


def audit_of(round_number: int, deal: Deal, shards: int) -> Audit | None:
    """Returns the audit of a round; None if it has none."""
    size = len(deal)
    if size == 1 or round_number % EVERY != EVERY - 1:
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
