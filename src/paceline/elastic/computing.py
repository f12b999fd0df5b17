"""What a member computes in a round: the sums of its nodes, which it keeps until the round is committed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from paceline.elastic.agreement import Deal
from paceline.elastic.audit import Audit
from paceline.elastic.speeds import smoothed
from paceline.parallel.digests import digest_of
from paceline.parallel.sharded.sums import Values, add
from paceline.parallel.sharded.tree import Node, add_up
from paceline.record.names import EventKind
from paceline.record.spans import Recorded


class Computing:
    """The sums that a member holds.

    Attributes:
        held: by node.
        shard_ns: how long a shard takes here, 0 before any was computed.
        audited: the digest of the shard that is audited in this round, 0 if it was not computed here.
    """

    def __init__(self) -> None:
        self.held: dict[Node, Values] = {}
        self.shard_ns = 0
        self.audited = 0
        self._attempts = 0  # to compute this round

    def compute(
        self, deal: Deal, rank: int, value_of: Callable[[int], Values], audit: Audit | None, *, is_step: bool
    ) -> None:
        """Computes those sums of this rank that it does not hold; in a step, measures how long a shard takes."""
        began_ns = time.perf_counter_ns()
        missing = [node for node in deal[rank] if node not in self.held]
        is_again = bool(missing) and self._attempts > 0
        self._attempts += 1
        with Recorded(EventKind.RECOMPUTE, "", len(missing)) if is_again else contextlib.nullcontext():
            for node in missing:
                self.held[node] = add_up(node, add, self._audited_value(value_of, audit), {})
        if is_step and missing:
            computed = sum(node.stop - node.first for node in missing)
            self.shard_ns = smoothed(self.shard_ns, (time.perf_counter_ns() - began_ns) // computed)
        if audit is not None and rank in audit.others:
            self.audited = digest_of(value_of(audit.shard))

    def forget(self) -> None:
        """Forgets the sums of a round that was committed."""
        self.held, self.audited, self._attempts = {}, 0, 0

    def _audited_value(self, value_of: Callable[[int], Values], audit: Audit | None) -> Callable[[int], Values]:
        """Returns `value_of`, which keeps a digest of the shard that is audited, if there is one."""
        if audit is None:
            return value_of

        def value_and_digest(shard: int) -> Values:
            value = value_of(shard)
            if shard == audit.shard:
                self.audited = digest_of(value)
            return value

        return value_and_digest
