"""Detection of stragglers, the ranks that others repeatedly wait for, based on arrival times at calls.

Durations of backward passes or calls do not reveal stragglers: in synchronous training they are equal on all ranks,
because fast ranks wait in their calls for slow ones. The cost of a last arrival is its delay after the median arrival.
If a rank made several calls before the first of them ended, the delay counts only once. The program runs ahead of a
device, so a rank arrives at a call on a device when the device has completed all earlier work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.operate.diagnosis.call_history import match_calls, span_of
from paceline.operate.diagnosis.clock_offset import aligned
from paceline.operate.diagnosis.finding import Cause, Diagnosis, lasting, named
from paceline.operate.diagnosis.job_snapshot import RankCall, RankState
from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot, job_snapshot_of
from paceline.operate.diagnosis.slow_links import slow_network

WORTH_TELLING, WORTH_TELLING_S = 0.1, 0.5  # minimum cost to report, as a fraction of the time and in seconds
_FEWEST_CALLS = 10
_FEWEST_LAST = 5  # a straggler arrives last at least this often; an evaluation delays fewer calls
_LARGEST_PART = 0.5  # a straggler's delay must not come mostly from a single call


@dataclass(frozen=True)
class Straggler:
    """A rank that others waited for.

    Attributes:
        rank: the number of the rank.
        cost_s: the time that would have been saved if the rank had arrived with the median rank, in seconds.
        span_s: the time from the first to the last call.
        times_last: the number of calls at which the rank arrived last.
        calls: the total number of calls.
        waited_s: the time that each other rank waited for this rank.
        data_s: the time that the rank waited for data beyond that of the median rank.
        steps: the number of recorded training steps; 0 if the program does not mark steps.
        device_s: the part of the cost for which the program had made the call but the device had not reached it.
    """

    rank: int
    cost_s: float
    span_s: float
    times_last: int
    calls: int
    waited_s: Mapping[int, float]
    data_s: float
    steps: int
    device_s: float = 0.0

    @property
    def share(self) -> float:
        """The fraction of the time span that the straggler cost."""
        return self.cost_s / self.span_s if self.span_s > 0 else 0.0


def stragglers(ranks: Sequence[RankState]) -> list[Straggler]:
    """Returns the stragglers, most expensive first. The ranks' times must be on one clock."""
    lags: dict[int, list[float]] = defaultdict(list)
    waited: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    on_device: dict[int, float] = defaultdict(float)
    matched = match_calls(ranks)
    before: dict[tuple[str, int], tuple[RankCall, float]] = {}
    for calls in matched:
        last = max(calls, key=lambda rank: calls[rank].ready_s)
        usual_s = median(call.ready_s for rank, call in calls.items() if rank != last)
        for rank, call in calls.items():
            lag_s = max(0.0, call.ready_s - usual_s)
            earlier = before.get((call.group, rank))
            is_counted = earlier is not None and (earlier[0].ended_s or 0.0) > call.ready_s
            fresh_s = max(0.0, lag_s - earlier[1]) if is_counted and earlier is not None else lag_s
            before[call.group, rank] = (call, lag_s)
            if rank == last:
                lags[rank].append(fresh_s)
                on_device[rank] += min(fresh_s, call.ready_s - call.arrived_s)
                for other, theirs in calls.items():
                    if fresh_s > 0 and other != rank:
                        waited[rank][other] += min(fresh_s, call.ready_s - theirs.ready_s)
    span_s = span_of(matched)
    usual_data_s = median(rank.data_s for rank in ranks) if ranks else 0.0
    by_number = {rank.rank: rank for rank in ranks}
    found = [
        Straggler(
            rank,
            sum(own),
            span_s,
            len(own),
            len(matched),
            dict(waited[rank]),
            max(0.0, by_number[rank].data_s - usual_data_s),
            len({call.step for call in by_number[rank].calls if call.step is not None}),
            on_device[rank],
        )
        for rank, own in lags.items()
        if len(matched) >= _FEWEST_CALLS and len(own) >= _FEWEST_LAST and max(own) <= _LARGEST_PART * sum(own)
    ]
    return sorted(found, key=lambda straggler: -straggler.cost_s)


def describe(found: Straggler, word: str = "rank") -> Diagnosis:
    """Returns the diagnosis of a straggler."""
    cause, why = _reason(found)
    who = named([found.rank], word)
    most = max(found.waited_s, key=lambda rank: found.waited_s[rank], default=None)
    victim = f", {named([most], word)} most of all" if most is not None and len(found.waited_s) > 1 else ""
    what_if = f"without it, {lasting(found.span_s)} would have been {lasting(found.span_s - found.cost_s)}"
    if found.steps > 1:
        step_ms = 1e3 * found.span_s / found.steps
        what_if = (
            f"if it were like the median, a step would take {step_ms * (1 - found.share):.0f} ms, not {step_ms:.0f}"
        )
    sentence = (
        f"{who} came last to {found.times_last} of {found.calls} calls, and the others waited "
        f"{lasting(found.cost_s)} for it{victim} ({found.share:.0%} of the time): it {why}; {what_if}"
    )
    return Diagnosis(cause, (found.rank,), sentence)


def _reason(found: Straggler) -> tuple[Cause, str]:
    if found.data_s > found.cost_s / 2:
        return Cause.LOADER, "waits longer for its data"
    if found.device_s > found.cost_s / 2:
        return Cause.SLOW_DEVICE, (
            "makes its calls in time, and its device computes more slowly (look at the device's clocks, temperature "
            "and power limit, and at what else runs on it)"
        )
    return Cause.SLOW_CORE, "computes more slowly (look at its core and what else runs there)"


def worth_telling(ranks: Sequence[RankState], word: str = "rank") -> list[Diagnosis]:
    """Returns diagnoses of the stragglers that cost more than a tenth of the time."""
    found = [late for late in stragglers(ranks) if late.share >= WORTH_TELLING and late.cost_s >= WORTH_TELLING_S]
    return [describe(straggler, word) for straggler in found]


def describe_slowdowns(snapshots: Iterable[MachineSnapshot], word: str = "rank") -> list[str]:
    """Returns the sentences about stragglers and a slow network to print at the end of a job; usually none."""
    seen = job_snapshot_of(snapshots).ranks
    ranks = aligned(seen, [rank.host for rank in seen])
    return [diagnosis.sentence for diagnosis in (*worth_telling(ranks, word), *slow_network(ranks))]
