"""Reports of connections that broke: when they call for a forced view, and when there were too many of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.elastic.policy import Policy


@dataclass(frozen=True)
class Break:
    """A report that waits for a forced view."""

    generation: int
    due_s: float


@dataclass
class Breaks:
    """The reports that no view has answered yet, and the views that were forced for no other cause."""

    waiting: dict[str, Break] = field(default_factory=dict)  # by reporter
    reasons: dict[str, str] = field(default_factory=dict)
    round: int = -1
    _forced_s: list[float] = field(default_factory=list)  # since a round was committed

    def went_on(self, round_: int) -> None:
        """Takes the number of rounds that a worker has committed."""
        if round_ > self.round:
            self.round = round_
            self._forced_s.clear()
            self.reasons.clear()

    def reported(self, uid: str, what: Break, reason: str) -> None:
        """Takes a report; a second one of the same worker does not begin the wait anew."""
        self.reasons[uid] = reason
        due_s = min(what.due_s, self.waiting.get(uid, what).due_s)
        self.waiting[uid] = Break(what.generation, due_s)

    def answered(self) -> None:
        """Forgets the reporters, since a forced view was given."""
        self.waiting.clear()

    def are_too_many(self, policy: Policy, now_s: float) -> bool:
        """Counts one more view that was forced without a death; returns whether the job should give up."""
        self._forced_s = [each for each in self._forced_s if now_s - each < policy.breaks_within_s] + [now_s]
        return len(self._forced_s) > policy.most_breaks
