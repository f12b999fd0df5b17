"""Whether the state of a learner of the usual loop is still that of the others; pure."""

from __future__ import annotations

from paceline.elastic.joining.wire import Result, Stepped


class StrayedError(Exception):
    """The learner's state is not, or cannot become, that of the others."""


class Course:
    """What a learner has made of a snapshot and of the members' steps since.

    A member that has committed a round may be lost before any other knows of it, and the others then commit another
    result. So each step says after which result it was made, and each round which one came before: a learner that has
    made a step which the others have not notices that.

    Args:
        round_number: the round that follows the snapshot.
        committed: the digest of the result of the round before.
        windows: into how many parts the state is divided, one of which is compared in each round.
        is_large: comparing a part takes a learner so long that it does so only once with each.
    """

    def __init__(self, round_number: int, committed: int, windows: int, *, is_large: bool = False) -> None:
        self.round = round_number
        self.committed = committed
        self.unchecked = frozenset(range(windows))  # those parts that were not compared since the first step
        self._windows = windows
        self._is_large = is_large
        self._has_stepped = False
        self._steps_of_round = 0

    def steps(self, item: Stepped) -> None:
        """Takes a step that is to be made now.

        Raises:
            StrayedError: it cannot be, or an earlier one was not made by the others.
        """
        if item.obstacle:
            raise StrayedError(item.obstacle)
        if self._steps_of_round:
            self._require_same(item.after)
        self.committed = item.after
        self._steps_of_round += 1
        self._has_stepped = True

    def compares(self, round_number: int) -> bool:
        """Whether a part of the learner's state before a round is to be compared with that of the members."""
        return not self._is_large or (self._has_stepped and round_number % self._windows in self.unchecked)

    def passes(self, item: Result, state: int | None) -> None:
        """Takes a round that the members have committed, and the digest of a part of the learner's own state before.

        The digest is None where that is not compared.

        Raises:
            StrayedError: the members' state was another.
        """
        if self._steps_of_round:
            self._require_same(item.before)
        if state is not None and item.state != state:
            raise StrayedError(
                f"before round {item.round} its state differed from that of the others. Something other than "
                "optimizer.step() changes parameters, or a step does not follow from the gradients alone"
            )
        if state is not None and self._has_stepped:
            self.unchecked -= {item.round % self._windows}
        self.round, self.committed = item.round + 1, item.digest
        self._steps_of_round = 0

    def _require_same(self, digest: int) -> None:
        if digest != self.committed:
            raise StrayedError(f"it has made a step before round {self.round} that the others have not committed")
