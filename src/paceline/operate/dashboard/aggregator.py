"""Aggregation of a job's samples into the displayed state. It uses no files, sockets or clock.

The what-if line estimates how long a step would take if the stragglers were as fast as the other ranks. The rule for
stragglers is in `operate/diagnosis/stragglers.py`. Lin et al. (OSDI 2025) replay whole traces to answer the same
question.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from paceline.operate.dashboard.dashboard_state import (
    AppendOnlyList,
    CallRow,
    DashboardState,
    DownsampledCurve,
    Figures,
    JobHeader,
    Point,
    RankRow,
    StepColumn,
    StragglerEstimate,
    Tail,
    Timeline,
    TimelineLane,
    about,
    in_ms,
)
from paceline.operate.dashboard.job_sample import (
    CallStatistics,
    JobEvent,
    JobInfo,
    JobSample,
    Line,
    RankActivity,
    RankSample,
    RankStep,
    Stack,
    StallNotice,
)
from paceline.operate.dashboard.link_rates import rows_of
from paceline.operate.diagnosis.finding import named
from paceline.operate.diagnosis.job_snapshot import JobSnapshot
from paceline.operate.diagnosis.stragglers import (
    FEWEST_STEPS,
    StepWork,
    StragglerCost,
    describe,
    find_stragglers,
    without_stalls,
)
from paceline.operate.diagnosis.wait_graph import waits_of

_STEPS_KEPT = 240
_LINES_KEPT = 2000
_EVENTS_KEPT = 500
_RECENT = 30  # number of steps over which means are computed
_PATIENCE = 3  # number of samples to wait for ranks that have not finished a step; other machines lag by one sample

_SAMPLES_OF_CALLS = 30  # number of samples over which call durations are averaged
_MOST_KINDS = 256
_MOST_ROWS = 12
_FAR = 1.2

_CURVES_KEPT = 16
_STEPS_OPEN = 4  # number of steps by which a rank's logged values may lag

_QUIET_S = 10.0  # a job without any new records for this long is reported as making no progress
_AWAY = (RankActivity.STARTING, RankActivity.DEAD, RankActivity.ENDED)

_STEPS_BETWEEN_TESTS = 60  # number of new steps between two searches for stragglers

_Kind = tuple[str, str, int, str]


class CallTable:
    """Recent durations of calls, grouped by kind."""

    def __init__(self) -> None:
        self._kinds: dict[_Kind, dict[int, deque[CallStatistics]]] = {}

    def take(self, ranks: Sequence[RankSample]) -> None:
        """Adds the calls in a sample."""
        for sample in ranks:
            for statistics in sample.calls:
                kind = statistics.operation, statistics.dtype, statistics.count, statistics.algorithm
                by_rank = self._kinds.pop(kind, {})  # reinserted at the end, so kinds stay ordered by their latest use
                by_rank.setdefault(sample.rank, deque(maxlen=_SAMPLES_OF_CALLS)).append(statistics)
                self._kinds[kind] = by_rank
        while len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]

    def rows(self) -> tuple[CallRow, ...]:
        """Returns the kinds of calls that take the most time, in descending order."""
        rows = [_row(kind, by_rank) for kind, by_rank in self._kinds.items()]
        return tuple(sorted(rows, key=lambda row: (-row.calls * row.actual, row.name))[:_MOST_ROWS])


def _row(kind: _Kind, by_rank: dict[int, deque[CallStatistics]]) -> CallRow:
    """Returns the row for a kind of call.

    The row shows the shortest duration over all ranks, because it includes the least waiting.
    """
    operation, dtype, count, algorithm = kind
    actual_s = min(
        sum(entry.took_s for entry in entries) / sum(entry.calls for entry in entries) for entries in by_rank.values()
    )
    predicted_s = next(iter(by_rank.values()))[-1].predicted_s
    return CallRow(
        name=f"{operation} of {count:,} {dtype}, {algorithm}",
        calls=max(sum(entry.calls for entry in entries) for entries in by_rank.values()),
        predicted=round(predicted_s * 1e3, 3),
        actual=round(actual_s * 1e3, 3),
        is_far=not predicted_s / _FAR <= actual_s <= predicted_s * _FAR,
    )


class Curves:
    """Curves of logged values: one curve per name, averaged over the ranks and downsampled."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], list[float]] = {}
        self._loggers: dict[str, int] = {}  # number of ranks that log each name
        self._downsampled: dict[str, DownsampledCurve] = {}
        self._points: list[Point] = []
        self._epoch = 0
        self._latest: AppendOnlyList[Point] = AppendOnlyList()

    def take(self, ranks: tuple[RankSample, ...]) -> None:
        """Adds the logged values in a sample."""
        for sample in ranks:
            for step, name, value in sample.values:
                if name in self._downsampled or len(self._downsampled) < _CURVES_KEPT:
                    self._downsampled.setdefault(name, DownsampledCurve())
                    self._open.setdefault((step, name), []).append(value)
        complete = [key for key in sorted(self._open) if self._is_complete(*key)]
        for step, name in complete:
            values = self._open.pop((step, name))
            self._loggers[name] = max(len(values), self._loggers.get(name, 0))
            self._add(Point(name, step, _short(fmean(values)), _short(min(values)), _short(max(values))))
        if complete:
            self._latest = AppendOnlyList(tuple(self._points), 0, self._epoch)

    def _is_complete(self, step: int, name: str) -> bool:
        """Returns True if all ranks that log this name have logged this step, or if several later steps were logged."""
        if len(self._open[step, name]) >= self._loggers.get(name, 1 << 30):
            return True
        later = sum(1 for other, its_name in self._open if its_name == name and other > step)
        return later >= _STEPS_OPEN

    def latest(self) -> AppendOnlyList[Point]:
        """Returns the points of all curves in insertion order."""
        return self._latest

    def _add(self, point: Point) -> None:
        curve = self._downsampled[point.name]
        epoch = curve.epoch
        if curve.points and point.step <= curve.points[-1].step:  # the job restarted from an earlier step
            curve = self._downsampled[point.name] = curve.until(point.step)
        done = curve.add(point)
        if curve.epoch == epoch:
            self._points += done
        else:  # thinning has replaced all points in the curve
            self._points = [kept for other in self._downsampled.values() for kept in other.points]
            self._epoch += 1


def _short(value: float) -> float:
    """Rounds a value to as many digits as a chart can show."""
    return float(f"{value:.6g}")


def owed_calls(sample: JobSample) -> tuple[str, ...]:
    """Returns a sentence for each call in which ranks wait, with the waiting and missing ranks and the waiting time."""
    states = tuple(rank.pending for rank in sample.ranks if rank.pending is not None)
    sentences = []
    for wait in waits_of(JobSnapshot(sample.now_s, states)):
        owing = [named(wait.absent)] if wait.absent else []
        owing += [f"{named(wait.strangers)} of the group"] if wait.strangers else []
        if owing:
            verb = "waits" if len(wait.waiters) == 1 else "wait"
            since = about(sample.now_s - wait.since_s)
            sentences.append(f"{named(wait.waiters)} {verb} for {' and '.join(owing)} in {wait.call}, for {since}")
    return tuple(sentences[:_MOST_ROWS])


def header_of(
    facts: JobInfo, ranks: tuple[RankSample, ...], verdict: StallNotice | None, now_s: float, step_s: float | None
) -> JobHeader:
    """Returns the header of the page.

    Args:
        facts: the properties of the job.
        ranks: the latest sample from each rank.
        verdict: the diagnosis if the job makes no progress, otherwise None.
        now_s: the current time on the job's clock.
        step_s: the recent mean duration of a step, or None if unknown.
    """
    step = max((sample.step for sample in ranks if sample.step is not None), default=None)
    ranks_here = sum(sample.state not in _AWAY for sample in ranks)
    total = facts.total_steps
    left_s = None
    if step is not None and total is not None and step_s is not None and not facts.outcome and verdict is None:
        left_s = max(0, total - step) * step_s
    quiet_s = now_s - max((sample.last_record_s for sample in ranks), default=now_s)
    parts = [_activity(facts, ranks, verdict, quiet_s, now_s)]
    if step is not None:
        parts.append(f"step {step:,}" if total is None else f"step {step:,} of {total:,}")
    if not facts.outcome:
        parts.append(f"{ranks_here} of {facts.world_size} {'rank' if facts.world_size == 1 else 'ranks'}")
    if facts.restarts:
        parts.append("1 restart" if facts.restarts == 1 else f"{facts.restarts} restarts")
    if left_s is not None:
        parts.append(f"about {about(left_s)} left" if left_s >= 1 else "nearly done")
    return JobHeader(
        sentence=", ".join(parts),
        health=_health(facts, ranks, verdict, quiet_s),
        run_id=facts.run_id,
        command=facts.command,
        security=facts.security,
        step=step,
        total_steps=total,
        share=min(1.0, step / total) if step is not None and total else None,
        ranks_here=ranks_here,
        world_size=facts.world_size,
        restarts=facts.restarts,
        elapsed_s=round(now_s - facts.started_s, 1),
        left_s=left_s,
    )


def _health(facts: JobInfo, ranks: tuple[RankSample, ...], verdict: StallNotice | None, quiet_s: float) -> str:
    if facts.outcome:
        return "over" if facts.outcome in ("finished", "stopped") else "bad"
    if verdict is not None or any(sample.state is RankActivity.DEAD for sample in ranks):
        return "bad"
    has_progress = any(sample.step is not None or sample.state is RankActivity.RUNNING for sample in ranks)
    return "good" if has_progress and quiet_s <= _QUIET_S else "waiting"


def _activity(
    facts: JobInfo, ranks: tuple[RankSample, ...], verdict: StallNotice | None, quiet_s: float, now_s: float
) -> str:
    if facts.outcome:
        return f"{facts.outcome} after {about(now_s - facts.started_s)}"
    if verdict is not None and verdict.is_failure:
        return "ending after a failure"
    if verdict is not None:
        return f"stuck for {about(max(quiet_s, now_s - verdict.at_s))}"
    if not any(sample.step is not None for sample in ranks):
        return "starting" if all(sample.state is RankActivity.STARTING for sample in ranks) else "running"
    return f"no progress for {about(quiet_s)}" if quiet_s > _QUIET_S else "training"


class StragglerWatch:
    """Searches the latest steps for stragglers whenever enough new steps have been added.

    Args:
        steps_kept: the number of most recent steps to search.
    """

    def __init__(self, steps_kept: int) -> None:
        self._work: deque[StepWork] = deque(maxlen=steps_kept)
        self._new = 0
        self._looks = 0
        self.costs: tuple[StragglerCost, ...] = ()

    def take(self, work: Sequence[StepWork]) -> None:
        """Adds steps, and searches for stragglers if there are enough new steps."""
        self._work.extend(work)
        self._new += len(work)
        if len(self._work) >= FEWEST_STEPS and self._new >= min(_STEPS_BETWEEN_TESTS, FEWEST_STEPS):
            self._new = 0
            self._looks += 1
            self.costs = tuple(find_stragglers(self._work, self._looks))


def what_if_of(costs: Sequence[StragglerCost], *, is_over: bool) -> StragglerEstimate | None:
    """Returns sentences about the stragglers and the step duration without them; None if there are no stragglers."""
    if not costs:
        return None
    sentences = [diagnosis.sentence for cost in costs for diagnosis in describe(cost, is_over=is_over)]
    ranks = tuple(sorted({straggler.rank for cost in costs for straggler in cost.stragglers}))
    text = " ".join(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in sentences)
    return StragglerEstimate(text, ranks, in_ms(costs[0].step_s), in_ms(costs[0].without_s))


class DashboardAggregator:
    """Aggregates consecutive samples into the dashboard's state.

    Args:
        steps_kept: the number of most recent steps to keep in the state.
        steps_averaged: the number of most recent steps to average. Steps with a stall are excluded.
    """

    def __init__(self, steps_kept: int = _STEPS_KEPT, steps_averaged: int = _RECENT) -> None:
        self._steps_averaged = steps_averaged
        self._sample: JobSample | None = None
        self._ranks: dict[int, RankSample] = {}
        self._open: dict[int, dict[int, RankStep]] = {}  # steps that not all ranks have finished, by step and rank
        self._latest: dict[int, RankStep] = {}  # each rank's part of the step shown in the timeline
        self._recent: dict[int, deque[RankStep]] = {}
        self._shown_up_to = -1
        self._steps: Tail[StepColumn] = Tail(steps_kept)
        self._watch = StragglerWatch(steps_kept)
        self._events: Tail[JobEvent] = Tail(_EVENTS_KEPT)
        self._log: Tail[Line] = Tail(_LINES_KEPT)
        self._taken = 0  # number of samples so far
        self._seen: dict[int, int] = {}  # number of the first sample that contained each open step
        self._stacks: dict[int, Stack] = {}
        self._curves = Curves()
        self._calls = CallTable()

    def take(self, sample: JobSample) -> None:
        """Adds the next sample."""
        self._sample = sample
        self._taken += 1
        self._events.extend(sample.events)
        self._log.extend(sample.lines)
        self._stacks.update((stack.rank, stack) for stack in sample.stacks)
        for rank in sample.ranks:
            self._ranks[rank.rank] = replace(rank, steps=(), values=(), calls=(), pending=None)
            recent = self._recent.setdefault(rank.rank, deque(maxlen=self._steps_averaged))
            recent.extend(rank.steps)
            for step in rank.steps:
                self._open.setdefault(step.step, {})[rank.rank] = step
                self._seen.setdefault(step.step, self._taken)
        self._drop_steps_before_restart(sample)
        for number in set(self._ranks) - {rank.rank for rank in sample.ranks}:
            del self._ranks[number]
        self._curves.take(sample.ranks)
        self._calls.take(sample.ranks)
        self._close_steps()

    @property
    def has_steps(self) -> bool:
        """Whether several ranks record their steps."""
        return any(sum(time is not None for time in column.compute) > 1 for column in self._steps.latest().items)

    @property
    def stragglers(self) -> tuple[StragglerCost, ...]:
        """The stragglers found by the latest search."""
        return self._watch.costs

    def state(self) -> DashboardState:
        """Returns the state as of the latest sample.

        Raises:
            ValueError: no sample has been added yet.
        """
        sample = self._sample
        if sample is None:
            raise ValueError("the dashboard has no samples yet, so there is nothing to show")
        steps = self._steps.latest()
        is_kept = without_stalls([column.duration for column in steps.items])
        recent = tuple(itertools.compress(steps.items[-self._steps_averaged :], is_kept[-self._steps_averaged :]))
        stalls = {column.step for column, is_one in zip(steps.items, is_kept, strict=True) if not is_one}
        parts = {rank: [step for step in own if step.step not in stalls] for rank, own in self._recent.items()}
        rates = {rank: _samples_per_s(kept) for rank, kept in parts.items()}
        figures = _figures(recent, parts, sum(rates.values()))
        step_s = figures.step / 1e3 if figures is not None else None
        ranks = tuple(self._ranks[rank] for rank in sorted(self._ranks))
        links, network = rows_of(sample.links, {rank.rank: rank.host for rank in ranks})
        return DashboardState(
            header=header_of(sample.facts, ranks, sample.verdict, sample.now_s, step_s),
            figures=figures,
            ranks=self._rows(sample, recent, rates),
            what_if=what_if_of(self.stragglers, is_over=bool(sample.facts.outcome)),
            steps=steps,
            timeline=_timeline(self._latest),
            curves=self._curves.latest(),
            links=links,
            network=network,
            owed=() if sample.facts.outcome else owed_calls(sample),
            calls=self._calls.rows(),
            events=self._events.latest(),
            log=self._log.latest(),
            verdict=sample.verdict,
            stacks=tuple(self._stacks[rank] for rank in sorted(self._stacks)),
        )

    def _drop_steps_before_restart(self, sample: JobSample) -> None:
        """Drops the steps before a restart, because step numbers start over."""
        now = [rank.step for rank in sample.ranks if rank.step is not None]
        if now and max(now) < self._shown_up_to:
            self._shown_up_to = -1
        for step in [step for step in self._open if step <= self._shown_up_to]:
            del self._open[step], self._seen[step]

    def _close_steps(self) -> None:
        """Adds columns for steps that all ranks have finished, and for steps that some rank will never finish."""
        columns, work = [], []
        for step in sorted(self._open):
            finished = self._open[step]
            if len(finished) < len(self._ranks) and self._taken - self._seen[step] < _PATIENCE:
                break
            del self._open[step], self._seen[step]
            self._shown_up_to = step
            self._latest = finished
            columns.append(_column(step, finished))
            work.append(_work_of(step, finished))
        self._steps.extend(columns)
        self._watch.take(work)

    def _rows(
        self, sample: JobSample, recent: tuple[StepColumn, ...], rates: Mapping[int, float]
    ) -> tuple[RankRow, ...]:
        own = {rank: _own_time(rank, recent) for rank in self._ranks}
        known = [time for time in own.values() if time]
        middle = median(known) if known else 0.0
        blamed = sample.verdict.ranks if sample.verdict is not None else ()
        slow = {straggler.rank for cost in self.stragglers for straggler in cost.stragglers}
        rows = []
        for rank, latest in sorted(self._ranks.items()):
            waits = [column.wait[rank] or 0.0 for column in recent if rank < len(column.wait)]
            rows.append(
                RankRow(
                    rank=rank,
                    host=latest.host,
                    pid=latest.pid,
                    state=latest.state.value,
                    doing=latest.doing,
                    step=latest.step,
                    samples_per_s=round(rates.get(rank, 0.0), 1),
                    compute=round(own[rank], 2),
                    wait=round(_mean(waits), 2),
                    slowness=round(own[rank] / middle, 3) if middle else 1.0,
                    is_slow=rank in slow,
                    memory_nbytes=latest.memory_nbytes,
                    silent_s=round(max(0.0, sample.now_s - latest.last_record_s), 1),
                    is_blamed=rank in blamed,
                )
            )
        return tuple(rows)


def _own_time(rank: int, recent: tuple[StepColumn, ...]) -> float:
    known = [time for column in recent if rank < len(column.compute) if (time := column.compute[rank]) is not None]
    return _mean(known)


def _mean(numbers: list[float]) -> float:
    """Returns the mean, or 0 for an empty list. This is ten times as fast as `fmean`, which computes an exact sum."""
    return sum(numbers) / len(numbers) if numbers else 0.0


def _samples_per_s(steps: Sequence[RankStep]) -> float:
    samples = sum([step.samples for step in steps])
    # not the difference between the last end and the first start, because steps may be missing
    took_s = sum([step.end_s - step.begin_s for step in steps])
    return samples / took_s if took_s > 0 and samples else 0.0


def _column(step: int, finished: dict[int, RankStep]) -> StepColumn:
    width = max(finished) + 1
    compute: list[float | None] = [None] * width
    wait: list[float | None] = [None] * width
    for rank, own in finished.items():
        compute[rank], wait[rank] = in_ms(own.compute_s), in_ms(own.exposed_s)
    parts = [_parts_of(own) for own in finished.values()]
    predicted = [own.predicted_s for own in finished.values() if own.predicted_s is not None]
    return StepColumn(
        step=step,
        duration=in_ms(fmean(own.duration_s for own in finished.values())),
        parts=tuple(in_ms(fmean(column)) for column in zip(*parts, strict=True)),
        compute=tuple(compute),
        wait=tuple(wait),
        predicted=in_ms(fmean(predicted)) if len(predicted) == len(finished) else None,
    )


def _work_of(step: int, finished: Mapping[int, RankStep]) -> StepWork:
    return StepWork(
        number=step,
        duration_s=fmean(own.duration_s for own in finished.values()),
        own_s={rank: own.compute_s for rank, own in finished.items()},
        data_s={rank: own.data_s for rank, own in finished.items()},
    )


def _parts_of(step: RankStep) -> tuple[float, ...]:
    """Returns the durations of a step's parts in seconds, in the order of `PARTS`."""
    named = (step.data_s, step.forward_s, step.backward_s, step.exposed_s, step.optimizer_s)
    return (*named, max(0.0, step.duration_s - sum(named)))


def _figures(
    recent: tuple[StepColumn, ...], steps: Mapping[int, Sequence[RankStep]], samples_per_s: float
) -> Figures | None:
    if not recent:
        return None
    duration = fmean(column.duration for column in recent)
    parts = tuple(round(fmean(part), 2) for part in zip(*(column.parts for column in recent), strict=True))
    predicted = [column.predicted for column in recent if column.predicted is not None]
    latest = [step for kept in steps.values() for step in kept]
    communication = sum(step.communication_s for step in latest)
    exposed = sum(step.exposed_s for step in latest)
    took = sum(step.duration_s for step in latest)
    return Figures(
        step=round(duration, 2),
        samples_per_s=round(samples_per_s, 1),
        exposed_share=round(exposed / took, 4) if took else 0.0,
        overlap=round(max(0.0, 1 - exposed / communication), 4) if communication else None,
        parts=parts,
        predicted=round(median(predicted), 2) if 2 * len(predicted) >= len(recent) else None,
    )


def _timeline(latest: dict[int, RankStep]) -> Timeline | None:
    if not latest:
        return None
    begin_s = min(step.begin_s for step in latest.values())
    end_s = max(step.end_s for step in latest.values())

    def since_begin(time_s: float) -> float:
        return round((time_s - begin_s) * 1e3, 3)

    lanes = []
    for rank, step in sorted(latest.items()):
        phases = tuple((name, since_begin(begin), since_begin(end)) for name, begin, end in step.phases)
        buckets = tuple(
            (since_begin(one.ready_s), since_begin(one.sent_s), since_begin(one.done_s), one.nbytes, one.name)
            for one in step.buckets
        )
        lanes.append(TimelineLane(rank, phases, buckets))
    return Timeline(next(iter(latest.values())).step, since_begin(end_s), tuple(lanes))
