"""Compares the calls made by the ranks of a group, to find the rank that deviates and the kind of deviation.

A training loop repeats its calls, so a group's history predicts the next call. A rank that makes a different call is at
fault, even in a group of two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from paceline.operate.diagnosis.job_snapshot import CallSignature, RankCall, RankState

_LONGEST_CONTEXT = 64  # comparing a longer history would not improve the prediction
_LOOKS_AHEAD = 16


def match_calls(ranks: Sequence[RankState]) -> list[dict[int, RankCall]]:
    """Returns the successful collectives that at least two ranks recorded, in order of completion.

    The calls of each collective are keyed by rank. Messages and group formation are excluded.
    """
    calls: dict[tuple[str, int], dict[int, RankCall]] = defaultdict(dict)
    for rank in ranks:
        for call in rank.calls:
            if not call.is_open and call.sequence:
                calls[call.group, call.sequence][rank.rank] = call
    matched = [by_rank for by_rank in calls.values() if len(by_rank) > 1]
    return sorted(matched, key=lambda by_rank: max(call.ended_s or 0.0 for call in by_rank.values()))


def span_of(matched: Sequence[Mapping[int, RankCall]]) -> float:
    """Returns the time from the first arrival to the last completion of these collectives, in seconds."""
    if not matched:
        return 0.0
    first = min(call.ready_s for call in matched[0].values())
    return max(call.ended_s or 0.0 for call in matched[-1].values()) - first


class MismatchKind(Enum):
    """The way in which a rank's calls deviate from those of the other ranks."""

    SKIPPED = "skipped, or made later"  # if the call fails immediately, these two cases cannot be distinguished
    ORDER = "another order"
    TWICE = "called twice"
    SKIPPED_OR_TWICE = "skipped or called twice"
    OTHER_SHAPE = "another shape"
    OTHER_CALL = "another call"


@dataclass(frozen=True)
class CallMismatch:
    """The first difference between the calls made by the members of a group.

    Attributes:
        sequence: the number of the first mismatched call in its group.
        deviating: the ranks that deviate; all ranks if the deviating ones cannot be determined.
        regular: the ranks that do not deviate.
        kind: the kind of deviation.
        theirs: the call made by the first deviating rank.
        expected: the call made by the other ranks, or the call predicted from the history.
        step: the training step in which the call was made, or None.
        is_guess: whether the choice of `deviating` is only a guess.
    """

    sequence: int
    deviating: tuple[int, ...]
    regular: tuple[int, ...]
    kind: MismatchKind
    theirs: CallSignature
    expected: CallSignature
    step: int | None = None
    is_guess: bool = False


def predicted(past: Sequence[CallSignature], count: int = _LOOKS_AHEAD) -> list[CallSignature]:
    """Predicts the next `count` calls.

    Finds the longest sequence of calls at the end of `past` that also occurs earlier in `past`, and repeats the calls
    that followed the earlier occurrence.
    """
    best, best_length = 0, 0
    for end in range(len(past) - 1, 0, -1):
        length = 0
        while length < min(end, _LONGEST_CONTEXT) and past[end - 1 - length] == past[-1 - length]:
            length += 1
        if length > best_length:
            best, best_length = end, length
        if length == min(len(past) - 1, _LONGEST_CONTEXT):
            break
    if best_length == 0:
        return []
    period = list(past[best:])
    return (period * (count // len(period) + 1))[:count]


def difference(calls: Mapping[int, Sequence[RankCall]], first: int = 0) -> CallMismatch | None:
    """Returns the first difference between the calls of a group's members, or None.

    Args:
        calls: the calls of each rank in the group, oldest first. The ranks' lists may cover different ranges of calls.
        first: the number of the first call to compare.
    """
    histories = {rank: {call.sequence: call for call in own} for rank, own in calls.items() if own}
    if len(histories) < 2:
        return None
    for number in sorted({number for own in histories.values() for number in own}):
        headers = {own[number].header for own in histories.values() if number in own}
        if number >= first and len(headers) > 1:
            return _explain(number, histories)
    return None


def root_difference(calls: Mapping[int, Sequence[RankCall]]) -> CallMismatch | None:
    """Returns the latest call whose root differs between a group's members, or None.

    Args:
        calls: the calls of each rank in the group, oldest first.
    """
    histories = {rank: {call.sequence: call for call in own} for rank, own in calls.items() if own}
    for number in sorted({number for own in histories.values() for number in own}, reverse=True):
        headers = [own[number].header for own in histories.values() if number in own]
        if len({header.root for header in headers}) > 1 and len({header.operation for header in headers}) == 1:
            return _explain(number, histories)
    return None


def _explain(number: int, histories: Mapping[int, Mapping[int, RankCall]]) -> CallMismatch:
    made = {rank: own[number] for rank, own in histories.items() if number in own}
    past = _past(histories, number)
    coming = predicted(past)
    counts = Counter(call.header for call in made.values())
    usual, is_tie = _usual(counts, past, coming)
    deviating = tuple(sorted(rank for rank, call in made.items() if is_tie or call.header != usual))
    first_deviating = next(rank for rank, call in sorted(made.items()) if call.header != usual)
    theirs, step = made[first_deviating].header, made[first_deviating].step
    if is_tie:
        kind = MismatchKind.OTHER_SHAPE if theirs.operation == usual.operation else MismatchKind.OTHER_CALL
        return CallMismatch(number, deviating, (), kind, theirs, usual, step, is_guess=True)
    regular = tuple(sorted(set(made) - set(deviating)))
    expected = _following(histories[regular[0]], number)
    due = [*expected, *coming[len(expected) :]]
    kind = _mismatch_kind(_following(histories[first_deviating], number), due, past)
    if kind is MismatchKind.SKIPPED_OR_TWICE and step is not None and number - 1 in histories[first_deviating]:
        kind = _by_step(histories[first_deviating], number, due)
    return CallMismatch(number, deviating, regular, kind, theirs, usual, step)


def _by_step(own: Mapping[int, RankCall], number: int, expected: Sequence[CallSignature]) -> MismatchKind:
    """Determines from the training steps, where possible, whether a rank skipped calls or made a call twice."""
    call = own[number]
    if own[number - 1].step != call.step:
        return MismatchKind.SKIPPED
    made = sum(1 for index, other in own.items() if other.step == call.step and index <= number)
    usual = Counter(Counter(other.step for other in own.values()).values()).most_common(1)[0][0]
    could_be_skipped = call.header in expected[1 : usual - made + 1]
    return MismatchKind.SKIPPED_OR_TWICE if could_be_skipped else MismatchKind.TWICE


def _past(histories: Mapping[int, Mapping[int, RankCall]], number: int) -> list[CallSignature]:
    """Returns the headers of the calls before call `number`, taken from the rank with the longest gapless record."""
    longest: list[CallSignature] = []
    for own in histories.values():
        past = []
        index = number - 1
        while index in own:
            past.append(own[index].header)
            index -= 1
        longest = max(longest, past, key=len)
    return longest[::-1]


def _following(own: Mapping[int, RankCall], number: int) -> list[CallSignature]:
    """Returns the headers of call `number` and the calls after it."""
    return [own[index].header for index in range(number, number + _LOOKS_AHEAD) if index in own]


def _usual(
    counts: Counter[CallSignature], past: Sequence[CallSignature], coming: Sequence[CallSignature]
) -> tuple[CallSignature, bool]:
    """Returns the call that is probably correct, and whether this choice is only a guess."""
    (usual, most), *others = counts.most_common()
    if all(count < most for _, count in others):
        return usual, False
    followers = {after for before, after in pairwise(past) if before == past[-1]}
    # A call that was made only once before may belong to the start of the program, such as an initial barrier.
    repeated = {header for header, count in Counter(past).items() if count > 1}
    for likely in (coming[:1], followers, repeated):
        found = [header for header in counts if header in likely]
        if len(found) == 1:
            return found[0], False
    return usual, True


def _mismatch_kind(
    theirs: Sequence[CallSignature], expected: Sequence[CallSignature], past: Sequence[CallSignature]
) -> MismatchKind:
    """Classifies the deviation of a rank that, after the calls `past`, made `theirs` instead of `expected`."""
    first = theirs[0]
    for length in range(2, min(len(theirs), len(expected)) + 1):
        if Counter(theirs[:length]) == Counter(expected[:length]):
            return MismatchKind.ORDER
    could_be_twice = bool(past) and first == past[-1] and list(theirs[1:]) == list(expected[: len(theirs) - 1])
    could_be_skipped = any(
        list(theirs) == list(expected[left_out : left_out + len(theirs)]) for left_out in range(1, len(expected))
    )
    if could_be_twice and could_be_skipped:
        return MismatchKind.SKIPPED_OR_TWICE
    if could_be_twice or could_be_skipped:
        return MismatchKind.TWICE if could_be_twice else MismatchKind.SKIPPED
    return MismatchKind.OTHER_SHAPE if first.operation == expected[0].operation else MismatchKind.OTHER_CALL


@dataclass(frozen=True)
class CallCountMismatch:
    """A step in which a rank made more or fewer calls than the other ranks, or than in its other steps."""

    rank: int
    step: int
    made: int
    usual: int

    @property
    def kind(self) -> MismatchKind:
        """The kind of deviation: calls were skipped or made twice."""
        return MismatchKind.SKIPPED if self.made < self.usual else MismatchKind.TWICE


def call_count_mismatch(calls: Mapping[int, Sequence[RankCall]]) -> CallCountMismatch | None:
    """Returns the first step in which one rank made a different number of calls than the other ranks, or None.

    Unlike `difference`, this function detects a skipped call even if all calls look the same. Only complete steps are
    compared.
    """
    per_rank = {rank: _counts(own) for rank, own in calls.items()}
    per_rank = {rank: counts for rank, counts in per_rank.items() if counts}
    if len(per_rank) < 2:
        return None
    usual_of = {rank: Counter(counts.values()).most_common(1)[0][0] for rank, counts in per_rank.items()}
    for step in sorted({step for counts in per_rank.values() for step in counts}):
        made = {rank: counts[step] for rank, counts in per_rank.items() if step in counts}
        if len(set(made.values())) < 2:
            continue
        common = Counter(made.values()).most_common()
        if len(common) > 1 and common[0][1] == common[1][1]:
            odd = [rank for rank in made if made[rank] != usual_of[rank]]
            if len(odd) == 1:
                return CallCountMismatch(odd[0], step, made[odd[0]], usual_of[odd[0]])
            continue
        first_deviating = next(rank for rank, count in sorted(made.items()) if count != common[0][0])
        return CallCountMismatch(first_deviating, step, made[first_deviating], common[0][0])
    return None


def _counts(calls: Sequence[RankCall]) -> dict[int, int]:
    """Counts the calls in each complete step.

    The first step, whose start may have been overwritten, and the last step, which is still running, are excluded.
    """
    counts = Counter(call.step for call in calls if call.step is not None)
    return {step: counts[step] for step in range(min(counts) + 1, max(counts))} if counts else {}
