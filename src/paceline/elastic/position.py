"""Where a worker is in the training: the round that comes next, and what it holds of it."""

from __future__ import annotations

from paceline.elastic.agreement import FRESH, Agreement, Status
from paceline.elastic.computing import Computing
from paceline.elastic.dealings import Dealings
from paceline.elastic.failpoints import reach
from paceline.elastic.portions import Portions
from paceline.parallel.sharded.sums import Values


class Position:
    """Where one worker is; it lasts through all the views that the worker is in.

    Args:
        shards: the number of shards of a step.

    Attributes:
        shards: that number.
        number: the round that comes next, FRESH for a worker without state.
        dealings: to whom batches were dealt out.
        portions: which shards each member computes.
        mine: the sums that this worker has computed in this round.
        voted: the result with which it has voted in this round.
        digest: of that.
        state: the digest of a part of the state at the beginning of this round.
        committed: the digest of the result of the round before.
        is_late: others have committed this round already, with that result.
        has_begun: this worker is in a batch.
        others_have: a member that is in the same round has begun its batch.
        guest_until: the round before which this worker is a guest, see `Status`.
    """

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.number = FRESH
        self.dealings = Dealings()
        self.portions = Portions(shards)
        self.mine = Computing()
        self.voted: Values = []
        self.digest = 0
        self.state = 0
        self.committed = 0
        self.is_late = False
        self.has_begun = False
        self.others_have = False
        self.guest_until = 0

    def status(self, *, teaches: bool) -> Status:
        """Returns what a member says about itself when it enters a view; `teaches` if it gives a lesson."""
        return Status(
            self.number,
            tuple((node.first, node.stop) for node in self.mine.held),
            self.mine.shard_ns,
            self.dealings.latest,
            self.has_begun,
            self.digest,
            self.committed,
            teaches=teaches,
            guest_until=self.guest_until,
        )

    def learn(self, agreed: Agreement, rank: int) -> None:
        """Takes over what the members of a new view have agreed on, when this worker has the state."""
        if rank in agreed.late:
            self.is_late = True
            reach("result.taken")
        else:
            self.number = agreed.round
        self.guest_until = agreed.guest_until[rank] if agreed.guest_until else 0

    def commit(self, *, is_replay: bool) -> None:
        """Goes on to the next round; a replayed one is another's."""
        was_late, self.is_late = self.is_late, False
        self.voted = []
        self.mine.forget()
        self.committed, self.digest = self.digest, 0
        self.number += 1
        # One that was late has agreed with the others on the round that comes now when it entered the view.
        if not was_late and not is_replay:
            self.portions.begin_round()
            self.others_have = False
        reach("round.committed")
