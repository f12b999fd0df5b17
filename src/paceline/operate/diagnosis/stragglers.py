"""Detection of stragglers: ranks that are slower than others by more than chance and their own variation can explain.

The launcher, `paceline analyze`, the report, the page and `paceline top` use the same rule. Its input is each rank's
own work in each step. Durations of backward passes or calls do not reveal stragglers. In synchronous training, these
durations are equal on all ranks, because fast ranks wait in their calls for slow ranks.

Some rank is last in every step, so being last is no evidence. The rule is a permutation test: if no rank differs from
the others, exchanging the ranks within a step does not change the distribution of their times (Pitman 1937). It is
applied to two values of each step. The first is a rank's position when the ranks are sorted by time (Friedman 1937). It
is high for a rank that is always slower. The second is the time that the other ranks wait for the last rank. It is long
for a rank with some long steps. The test determines how probable a rank's sum of values is if the value of each step is
drawn from all ranks. This probability is bounded by the method of Chernoff (1952). The bound holds for any number of
steps and for heavy tails, because a single long pause is one draw among `n` ranks, however long it is.

Consecutive steps are not independent, because another process may occupy a core for several seconds. Steps are
therefore summed in blocks, which are merged until neighboring blocks are uncorrelated (Flyvbjerg and Petersen 1989),
and the mean over the blocks must exceed three standard errors. The probability is multiplied by the number of tests and
by the number of ranks (Bonferroni), and by `k (k + 1) / 2` if the steps are tested for the k-th time (a spending
function, Lan and DeMets 1983).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from paceline.errors import ordinal
from paceline.operate.diagnosis.call_history import match_calls
from paceline.operate.diagnosis.clock_offset import aligned
from paceline.operate.diagnosis.finding import Cause, Diagnosis, milliseconds, named
from paceline.operate.diagnosis.job_snapshot import CallSignature, RankCall, RankState
from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot, job_snapshot_of
from paceline.operate.diagnosis.slow_links import slow_network

MOST_PROBABLE = 1e-3  # maximum probability that a healthy job is reported to have a straggler
SMALLEST_SHARE = 0.05  # minimum difference to report, as a fraction of a step without the wait for the last rank
FEWEST_STEPS = 100  # with fewer steps, a core disturbed for several seconds is indistinguishable from a slow core
_TESTS = 2

_MOST_BLOCKS = 48  # sufficient, because 48 blocks bound the probability for two ranks by 2^-48
_FEWEST_BLOCKS = 12
_CORRELATED = 1.5  # autocorrelation in standard errors, 1 / sqrt(blocks), beyond which blocks are merged
_DEVIATIONS = 3.0  # minimum mean over the blocks, in standard errors
_SEARCH_STEPS = 60

_MOST_ALIKE = 8  # maximum number of calls of one kind in an iteration

# a step has a stall if its duration exceeds this multiple of the median or (LONG) of the 95th percentile
_STALL_TIMES_MEDIAN, _STALL_TIMES_LONG = 20.0, 5.0
_MOST_DIGITS = 6  # digits of a confidence level such as 99.9999%


@dataclass(frozen=True)
class StepWork:
    """The work of the ranks in one step, or in one iteration of a program that records no steps.

    Attributes:
        number: the number of the step or iteration.
        duration_s: the time from the end of the previous step to the end of this one, in seconds.
        own_s: each rank's own time in seconds, without waiting for others. Only the differences between ranks matter.
        data_s: the time that each rank waited for data, in seconds; may be empty.
        device_s: the part of each rank's own time in which the program had made its calls but the device had not
            reached the calls, in seconds; may be empty.
        is_step: whether this is a recorded training step.
    """

    number: int
    duration_s: float
    own_s: Mapping[int, float]
    data_s: Mapping[int, float] = field(default_factory=dict)
    device_s: Mapping[int, float] = field(default_factory=dict)
    is_step: bool = True


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others.

    Attributes:
        rank: the number of the rank.
        cause: `Cause.SLOW_CORE`, `SLOW_DEVICE`, `LOADER` or `LONG_STEPS`.
        excess_s: the additional time per step compared with the median of the other ranks, in seconds. If the rank is
            slower only in some steps, only these steps count.
        share: the mean additional time, as a fraction of the mean duration of a step.
        long_steps: the number of steps in which the rank is slower; None if the rank is slower in general.
        period: the interval between the steps in which the rank is slower, if the interval is constant, otherwise None.
        probability: the probability that chance alone makes any rank appear this slow.
    """

    rank: int
    cause: Cause
    excess_s: float
    share: float
    long_steps: int | None
    period: int | None
    probability: float


@dataclass(frozen=True)
class StragglerCost:
    """The stragglers among the ranks that work together, and their cost.

    Attributes:
        stragglers: the stragglers, slowest first.
        ranks: the number of ranks.
        steps: the number of steps without a stall.
        step_s: the mean duration of a step, in seconds.
        without_s: the estimated mean duration, in seconds, if the stragglers were as fast as the other ranks.
        is_step: whether the program records training steps.
    """

    stragglers: tuple[Straggler, ...]
    ranks: int
    steps: int
    step_s: float
    without_s: float
    is_step: bool


def without_stalls(durations_s: Sequence[float]) -> list[bool]:
    """Returns a flag for each step: False if the step's duration indicates a stall.

    A step with a stall, such as a stopped rank or a long evaluation, is not representative of the other steps.
    """
    if len(durations_s) < 3:
        return [True] * len(durations_s)
    ordered = sorted(durations_s)
    long_s = ordered[min(math.ceil(0.95 * len(ordered)) - 1, len(ordered) - 2)]
    limit_s = min(_STALL_TIMES_MEDIAN * median(ordered), _STALL_TIMES_LONG * long_s)
    return [duration_s <= limit_s or limit_s <= 0 for duration_s in durations_s]


def find_stragglers(work: Iterable[StepWork], looks: int = 1) -> list[StragglerCost]:
    """Returns the stragglers of each set of ranks that work together, in descending order of cost; usually empty.

    Args:
        work: the steps, oldest first.
        looks: the number of tests of this job's steps so far, including this one.
    """
    by_ranks: dict[frozenset[int], list[StepWork]] = defaultdict(list)
    for step in work:
        if len(step.own_s) > 1:
            by_ranks[frozenset(step.own_s)].append(step)
    factor = _TESTS * looks * (looks + 1) / 2 * sum(map(len, by_ranks))
    found: list[StragglerCost] = []
    for steps in by_ranks.values():
        kept = without_stalls([step.duration_s for step in steps])
        cost = _cost_of([step for step, is_kept in zip(steps, kept, strict=True) if is_kept], factor)
        if cost is not None:
            found.append(cost)
    found.sort(key=lambda cost: cost.steps * (cost.without_s - cost.step_s))
    known: set[int] = set()
    fresh = []
    for cost in found:  # a rank in several groups is reported once
        if any(straggler.rank not in known for straggler in cost.stragglers):
            fresh.append(cost)
        known.update(straggler.rank for straggler in cost.stragglers)
    return fresh


class _StepTable:
    """The steps of one set of ranks as rows, with the differences between the ranks."""

    def __init__(self, steps: Sequence[StepWork]) -> None:
        self.steps = steps
        self.ranks = sorted(steps[0].own_s)
        self.own = [[step.own_s[rank] for rank in self.ranks] for step in steps]
        self.excess: list[list[float]] = []  # per step and rank: own time minus the others' median
        # per step: the last rank's excess, that is, the median of the other ranks' waits; 0 for the other ranks
        self.waits: list[list[float]] = []
        self.places: list[list[float]] = []  # per step and rank: 0 for the fastest rank, 1 for the slowest
        for row in self.own:
            order = sorted(range(len(row)), key=row.__getitem__)
            ordered = [row[column] for column in order]
            excess, places = [0.0] * len(row), [0.0] * len(row)
            for place, column in enumerate(order):
                excess[column] = row[column] - _median_without(ordered, place)
                places[column] = place / (len(row) - 1)
            _share_ties(ordered, order, places)
            last = order[-1]
            self.excess.append(excess)
            self.places.append(places)
            self.waits.append([excess[column] if column == last else 0.0 for column in range(len(row))])
        self.step_s = fmean(step.duration_s for step in steps)
        self.usual_s = median(step.duration_s - max(waits) for step, waits in zip(steps, self.waits, strict=True))

    def column(self, rows: Sequence[Sequence[float]], rank: int) -> list[float]:
        """Returns the values of one rank."""
        column = self.ranks.index(rank)
        return [row[column] for row in rows]


def _median_without(ordered: Sequence[float], place: int) -> float:
    """Returns the median of a sorted sequence without one of its elements."""
    count = len(ordered) - 1
    first, second = (count - 1) // 2, count // 2
    return (ordered[first + (first >= place)] + ordered[second + (second >= place)]) / 2


def _share_ties(ordered: Sequence[float], order: Sequence[int], places: list[float]) -> None:
    """Assigns the mean of their positions to ranks with equal times."""
    first = 0
    while first < len(ordered):
        end = first + 1
        while end < len(ordered) and ordered[end] == ordered[first]:
            end += 1
        if end - first > 1:
            mean = (first + end - 1) / 2 / (len(ordered) - 1)
            for column in order[first:end]:
                places[column] = mean
        first = end


def _cost_of(steps: Sequence[StepWork], factor: float) -> StragglerCost | None:
    if len(steps) < FEWEST_STEPS:
        return None
    table = _StepTable(steps)
    if table.usual_s <= 0:
        return None
    found = [
        straggler
        for rank in table.ranks
        if (straggler := _slow_as_a_rule(table, rank, factor) or _slow_at_times(table, rank, factor)) is not None
    ]
    if not found:
        return None
    without_s = max(0.0, table.step_s - _saved_s(table, found))
    order = tuple(sorted(found, key=lambda straggler: -straggler.share))
    return StragglerCost(order, len(table.ranks), len(steps), table.step_s, without_s, steps[0].is_step)


def _slow_as_a_rule(table: _StepTable, rank: int, factor: float) -> Straggler | None:
    excess_s = median(table.column(table.excess, rank))
    if excess_s < SMALLEST_SHARE * table.usual_s:
        return None
    probability = factor * probability_of_sum(table.places, table.ranks.index(rank))
    if probability > MOST_PROBABLE:
        return None
    cause = _cause_of(table, rank, excess_s * len(table.steps), Cause.SLOW_CORE)
    return Straggler(rank, cause, excess_s, excess_s / table.step_s, None, None, probability)


def _slow_at_times(table: _StepTable, rank: int, factor: float) -> Straggler | None:
    waits = table.column(table.waits, rank)
    others_s = (sum(map(sum, table.waits)) - sum(waits)) / (len(table.ranks) - 1)
    excess_s = (sum(waits) - others_s) / len(waits)
    if excess_s < SMALLEST_SHARE * table.usual_s:
        return None
    probability = factor * probability_of_sum(table.waits, table.ranks.index(rank))
    if probability > MOST_PROBABLE:
        return None
    is_long = _long_steps(waits)
    steps = [step for step, is_one in zip(table.steps, is_long, strict=True) if is_one]
    long_s = fmean(wait for wait, is_one in zip(waits, is_long, strict=True) if is_one)
    cause = _cause_of(table, rank, long_s * len(steps), Cause.LONG_STEPS)
    period = _period_of([step.number for step in steps])
    return Straggler(rank, cause, long_s, excess_s / table.step_s, len(steps), period, probability)


def _long_steps(waits: Sequence[float]) -> list[bool]:
    """Returns a flag for each step: True if its wait is at least half of the self-weighted mean wait."""
    limit_s = sum(wait * wait for wait in waits) / sum(waits) / 2
    return [wait >= limit_s for wait in waits]


def _period_of(numbers: Sequence[int]) -> int | None:
    """Returns the interval between steps if almost all intervals are equal, otherwise None."""
    gaps = Counter(later - earlier for earlier, later in itertools.pairwise(numbers))
    period, count = gaps.most_common(1)[0] if gaps else (0, 0)
    return period if period > 1 and count >= 0.8 * sum(gaps.values()) else None


def _cause_of(table: _StepTable, rank: int, excess_s: float, otherwise: Cause) -> Cause:
    """Returns the cause of more than half of a rank's additional time, which totals `excess_s`."""
    others = [other for other in table.ranks if other != rank]
    data_s = [step.data_s for step in table.steps if step.data_s]
    if sum(waits[rank] - median(waits[other] for other in others) for waits in data_s) > excess_s / 2:
        return Cause.LOADER
    if sum(step.device_s.get(rank, 0.0) for step in table.steps) > excess_s / 2:
        return Cause.SLOW_DEVICE
    return otherwise


def _saved_s(table: _StepTable, found: Sequence[Straggler]) -> float:
    """Returns the mean time per step that would be saved if the stragglers were as fast as the other ranks.

    For a rank that is slower in general, only the usual additional time is subtracted, so its own variations remain.
    For a rank that is slower in some steps only, the time in these steps is replaced by the median of the other ranks.
    """
    changed = [list(row) for row in table.own]
    for straggler in found:
        column = table.ranks.index(straggler.rank)
        if straggler.long_steps is None:
            less_s = [straggler.excess_s] * len(changed)
        else:
            waits = [row[column] for row in table.waits]
            less_s = [wait if is_one else 0.0 for wait, is_one in zip(waits, _long_steps(waits), strict=True)]
        for row, less in zip(changed, less_s, strict=True):
            row[column] -= less
    return fmean(max(0.0, max(row) - max(new)) for row, new in zip(table.own, changed, strict=True))


def probability_of_sum(values: Sequence[Sequence[float]], column: int) -> float:
    """Returns an upper bound on the probability that chance makes the sum of a column this large.

    Args:
        values: the values of each step, oldest first: one nonnegative value for each rank.
        column: the index of the tested rank.
    """
    blocks = _blocks(values, -(-len(values) // _MOST_BLOCKS))
    while len(blocks) >= _FEWEST_BLOCKS and _is_correlated([_advantage(block, column) for block in blocks]):
        blocks = _blocks(blocks, 2)
    if len(blocks) < _FEWEST_BLOCKS:
        return 1.0
    advantages = [_advantage(block, column) for block in blocks]
    mean = fmean(advantages)
    variance = sum((value - mean) ** 2 for value in advantages) / (len(advantages) - 1)
    if mean <= _DEVIATIONS * math.sqrt(variance / len(advantages)):
        return 1.0
    scale = max(max(block) for block in blocks)
    return _chernoff_bound([[value / scale for value in block] for block in blocks], column)


def _blocks(values: Sequence[Sequence[float]], size: int) -> list[list[float]]:
    """Adds up `size` consecutive rows at a time; drops the oldest rows that do not fill a block."""
    return [
        [sum(column) for column in zip(*values[first : first + size], strict=True)]
        for first in range(len(values) % size, len(values), size)
    ]


def _advantage(block: Sequence[float], column: int) -> float:
    """Returns the difference between a rank's value and the mean of the other ranks' values."""
    return block[column] - (sum(block) - block[column]) / (len(block) - 1)


def _is_correlated(series: Sequence[float]) -> bool:
    """Returns True if neighbors in a series are positively correlated beyond chance."""
    mean = fmean(series)
    centered = [value - mean for value in series]
    variance = sum(value * value for value in centered)
    correlation = sum(one * next_one for one, next_one in itertools.pairwise(centered))
    return variance > 0 and correlation / variance > _CORRELATED / math.sqrt(len(series))


def _chernoff_bound(blocks: Sequence[Sequence[float]], column: int) -> float:
    """Returns the minimum over t > 0 of E[exp(t X)] / exp(t x); X sums one value per block, drawn from all ranks.

    Args:
        blocks: the values of each block, at most 1.
        column: the index of the rank with the observed sum x.
    """
    observed = sum(block[column] for block in blocks)

    def logarithm(t: float) -> float:
        return (
            sum(math.log(sum(math.exp(t * value) for value in block) / len(block)) for block in blocks) - t * observed
        )

    return math.exp(min(0.0, _minimum(logarithm)))


def _minimum(convex: Callable[[float], float]) -> float:
    """Returns the minimum of a convex function on (0, 512], found by a golden-section search."""
    high = 1.0
    while high < 256 and convex(2 * high) < convex(high):
        high *= 2
    low, high, ratio = 0.0, 2 * high, (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = convex(left), convex(right)
    for _ in range(_SEARCH_STEPS):
        if high - low < 1e-3 * high:
            break
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = convex(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = convex(right)
    return min(at_left, at_right)


def work_before_calls(ranks: Sequence[RankState]) -> list[StepWork]:
    """Derives the ranks' work from their arrival times at calls. All times must be on one clock.

    A rank's lateness at a call is measured relative to the median rank. If a rank made several calls before the first
    of them ended, only the additional lateness counts. The lateness at all calls of a training step is added up. If the
    program records no steps, the lateness at all calls of an iteration is added up. An iteration lasts from a call of
    one kind to the next call of the same kind.
    """
    latest: dict[tuple[str, int], tuple[RankCall, float]] = {}
    sums: dict[tuple[frozenset[int], int], _CallSum] = {}
    has_steps = any(call.step is not None for rank in ranks for call in rank.calls)
    matched = match_calls(ranks)
    for calls, number in zip(matched, _steps_of(matched) if has_steps else _iterations_of(matched), strict=True):
        if number is None:
            continue  # the call was made before the first step
        usual_s = median(call.ready_s for call in calls.values())
        members = frozenset(calls)
        total = sums.setdefault((members, number), _CallSum(has_steps))
        for rank, call in calls.items():
            late_s = call.ready_s - usual_s
            earlier = latest.get((call.group, rank))
            is_counted = earlier is not None and (earlier[0].ended_s or 0.0) > call.ready_s
            fresh_s = late_s - earlier[1] if is_counted and earlier is not None else late_s
            latest[call.group, rank] = (call, late_s)
            total.own_s[rank] += fresh_s
            total.device_s[rank] += max(0.0, min(fresh_s, call.ready_s - call.arrived_s))
        total.ended_s = max(call.ended_s or 0.0 for call in calls.values())
    return _with_durations(sums, {rank.rank: rank.data_s for rank in ranks})


def _steps_of(matched: Sequence[Mapping[int, RankCall]]) -> list[int | None]:
    return [next((call.step for call in calls.values() if call.step is not None), None) for calls in matched]


def _iterations_of(matched: Sequence[Mapping[int, RankCall]]) -> list[int | None]:
    """Returns each call's iteration, counted among the calls of the same ranks; None before the first iteration.

    An iteration begins with a call of the rarest kind. Kinds of calls that do not occur in every iteration are not
    considered.
    """
    kinds = [(frozenset(calls), next(iter(calls.values())).header) for calls in matched]
    counts: dict[frozenset[int], Counter[CallSignature]] = defaultdict(Counter)
    for members, header in kinds:
        counts[members][header] += 1
    first = {
        members: min((count, str(header)) for header, count in own.items() if count >= max(own.values()) / _MOST_ALIKE)[
            1
        ]
        for members, own in counts.items()
    }
    begun: Counter[frozenset[int]] = Counter()
    numbers: list[int | None] = []
    for members, header in kinds:
        begun[members] += str(header) == first[members]
        numbers.append(begun[members] or None)
    return numbers


class _CallSum:
    """The sums over the calls of one step."""

    def __init__(self, is_step: bool) -> None:
        self.is_step = is_step
        self.own_s: dict[int, float] = defaultdict(float)
        self.device_s: dict[int, float] = defaultdict(float)
        self.ended_s = 0.0


def _with_durations(sums: Mapping[tuple[frozenset[int], int], _CallSum], data_s: Mapping[int, float]) -> list[StepWork]:
    """Returns the work in all steps except the first step of each group, whose beginning is unknown."""
    counts = Counter(members for members, _ in sums)
    ended_s: dict[frozenset[int], float] = {}
    work = []
    for (members, number), total in sums.items():
        if members in ended_s:
            share = {rank: data_s[rank] / counts[members] for rank in members}
            duration_s = total.ended_s - ended_s[members]
            work.append(StepWork(number, duration_s, total.own_s, share, total.device_s, total.is_step))
        ended_s[members] = total.ended_s
    return work


def describe(cost: StragglerCost, word: str = "rank", *, is_over: bool = False) -> list[Diagnosis]:
    """Returns a diagnosis for each straggler. The last one includes the estimated step duration without stragglers.

    Args:
        cost: the stragglers and their cost.
        word: "rank" or "worker".
        is_over: whether the job has ended; the sentences are then in the past tense.
    """
    found = [
        Diagnosis(straggler.cause, (straggler.rank,), _sentence(straggler, cost, word, is_over=is_over))
        for straggler in cost.stragglers
    ]
    last = found[-1]
    return [
        *found[:-1],
        Diagnosis(last.cause, last.blamed, f"{last.sentence}; {what_if(cost, word, is_over=is_over)}"),
    ]


def what_if(cost: StragglerCost, word: str = "rank", *, is_over: bool = False) -> str:
    """Returns a clause that states how long a step would take if the stragglers were as fast as the other ranks."""
    who = named([straggler.rank for straggler in cost.stragglers], word)
    others = "the other" if cost.ranks == 2 else "the others"
    be = "had been" if is_over else "were"
    take = "would have taken" if is_over else "would take"
    durations = f"{milliseconds(1e3 * cost.without_s)} instead of {milliseconds(1e3 * cost.step_s)}"
    less = 1 - cost.without_s / cost.step_s
    return f"if {who} {be} like {others}, {_unit(cost)} {take} {durations} ({less:.0%} less)"


def _unit(cost: StragglerCost) -> str:
    return "a step" if cost.is_step else "an iteration"


def _sentence(found: Straggler, cost: StragglerCost, word: str, *, is_over: bool) -> str:
    unit = "step" if cost.is_step else "iteration"
    who, more = named([found.rank], word), milliseconds(1e3 * found.excess_s)
    others = f"the other {word}" if cost.ranks == 2 else "the median of the others"
    if found.long_steps is None:
        needs = "needed" if is_over else "needs"
        finding = f"{who} {needs} {more} more than {others} for its own work in a typical {unit}"
    else:
        takes = "took" if is_over else "takes"
        often = f"every {ordinal(found.period)} {unit}" if found.period else f"{found.long_steps} {unit}s"
        finding = f"in {often}, {who} {takes} {more} longer than {others} for its own work"
    evidence = f"{cost.steps} {unit}s, confidence {_confidence(found.probability)}"
    return (
        f"{finding}, {found.share:.0%} of {_unit(cost)} on average ({evidence}): it {_reason(found, is_over=is_over)}"
    )


def _confidence(probability: float) -> str:
    """Formats a confidence level, rounded down to a number of nines.

    >>> _confidence(4e-4), _confidence(1e-30)
    ('99.9%', '99.9999%')
    """
    digits = min(_MOST_DIGITS, math.floor(-math.log10(max(probability, 1e-30))))
    return f"{100 - 100 * 10**-digits:.{max(0, digits - 2)}f}%"


def _reason(found: Straggler, *, is_over: bool) -> str:
    if found.cause is Cause.LOADER:
        return "waited longer for its data" if is_over else "waits longer for its data"
    if found.cause is Cause.SLOW_DEVICE:
        makes, computes = ("made", "computed") if is_over else ("makes", "computes")
        return (
            f"{makes} its calls in time, and its device {computes} more slowly (look at the device's clocks, "
            "temperature and power limit, and at what else runs on it)"
        )
    if found.cause is Cause.LONG_STEPS:
        return (
            f"{'had' if is_over else 'has'} more work in these than the others, or {'was' if is_over else 'is'} "
            "interrupted (look at the size of its batches, and at what only this rank does in these steps)"
        )
    return f"{'computed' if is_over else 'computes'} more slowly (look at its core and what else runs there)"


def describe_slowdowns(snapshots: Iterable[MachineSnapshot], word: str = "rank") -> list[str]:
    """Returns the sentences about stragglers and a slow network to print at the end of a job; usually empty."""
    seen = job_snapshot_of(snapshots).ranks
    ranks = aligned(seen, [rank.host for rank in seen])
    return [diagnosis.sentence for diagnosis in (*slow_ranks(ranks, word), *slow_network(ranks))]


def slow_ranks(ranks: Sequence[RankState], word: str = "rank") -> list[Diagnosis]:
    """Returns the diagnoses of the stragglers of a job that has ended, derived from its calls."""
    found = find_stragglers(work_before_calls(ranks))
    return [diagnosis for cost in found for diagnosis in describe(cost, word, is_over=True)]
