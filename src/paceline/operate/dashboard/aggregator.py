"""Keeps what a job's picture is made of, from one sample to the next. It has neither files nor sockets nor a clock.

How long calls take, beside what the engine predicted for them.

The values that the program logs, such as its loss: over the ranks, and over all steps with few points.

The state of the job in one sentence, with the time that is left.

What a step would take if its slowest rank were like the median: the what-if line.

In data-parallel training every step lasts as long as its slowest rank's own work and what cannot be hidden of the
communication, which is the same for all. The time that one rank costs is therefore the distance of its own time from
that of the next slowest, or from the median if that is longer, in each step (Lin et al., OSDI 2025, replay whole
traces for the same question).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from paceline.operate.dashboard.dashboard_state import (
    CallRow,
    DashboardState,
    Figures,
    Growing,
    JobHeader,
    Point,
    RankRow,
    StepColumn,
    Tail,
    Thinned,
    Timeline,
    TimelineLane,
    WhatIf,
    about,
    in_ms,
    milliseconds,
)
from paceline.operate.dashboard.job_sample import (
    CallTally,
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

_LOOKS = 30  # over which a kind's times are taken
_MOST_KINDS = 256
_MOST_ROWS = 12
_FAR = 1.2

_Kind = tuple[str, str, int, str]


class CallTable:
    """Keeps the recent times of each kind of call, look by look."""

    def __init__(self) -> None:
        self._kinds: dict[_Kind, dict[int, deque[CallTally]]] = {}

    def take(self, ranks: Sequence[RankSample]) -> None:
        """Takes what the ranks have completed since the last look."""
        for each in ranks:
            for tally in each.calls:
                kind = tally.operation, tally.dtype, tally.count, tally.algorithm
                by_rank = self._kinds.pop(kind, {})  # comes behind the others, as the latest
                by_rank.setdefault(each.rank, deque(maxlen=_LOOKS)).append(tally)
                self._kinds[kind] = by_rank
        while len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]

    def rows(self) -> tuple[CallRow, ...]:
        """Returns the kinds that take most of the time, longest first."""
        rows = [_row(kind, by_rank) for kind, by_rank in self._kinds.items()]
        return tuple(sorted(rows, key=lambda row: (-row.calls * row.actual, row.name))[:_MOST_ROWS])


def _row(kind: _Kind, by_rank: dict[int, deque[CallTally]]) -> CallRow:
    """Returns a kind's row. The rank whose calls are the shortest waits least for others that come late."""
    operation, dtype, count, algorithm = kind
    actual_s = min(
        sum(each.took_s for each in tallies) / sum(each.calls for each in tallies) for tallies in by_rank.values()
    )
    predicted_s = next(iter(by_rank.values()))[-1].predicted_s
    return CallRow(
        name=f"{operation} of {count:,} {dtype}, {algorithm}",
        calls=max(sum(each.calls for each in tallies) for tallies in by_rank.values()),
        predicted=round(predicted_s * 1e3, 3),
        actual=round(actual_s * 1e3, 3),
        is_far=not predicted_s / _FAR <= actual_s <= predicted_s * _FAR,
    )


_NAMES_KEPT = 16
_STEPS_OPEN = 4  # a rank may log its value so many steps after the others


class Curves:
    """Takes what each rank has logged, and returns one curve a name."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], list[float]] = {}
        self._loggers: dict[str, int] = {}  # how many ranks log this name, once that is known
        self._thinned: dict[str, Thinned] = {}
        self._points: list[Point] = []
        self._epoch = 0
        self._growing: Growing[Point] = Growing()

    def take(self, ranks: tuple[RankSample, ...]) -> None:
        """Takes the values of a sample."""
        for each in ranks:
            for step, name, value in each.values:
                if name in self._thinned or len(self._thinned) < _NAMES_KEPT:
                    self._thinned.setdefault(name, Thinned())
                    self._open.setdefault((step, name), []).append(value)
        complete = [key for key in sorted(self._open) if self._is_complete(*key)]
        for step, name in complete:
            values = self._open.pop((step, name))
            self._loggers[name] = max(len(values), self._loggers.get(name, 0))
            self._add(Point(name, step, _short(fmean(values)), _short(min(values)), _short(max(values))))
        if complete:
            self._growing = Growing(tuple(self._points), 0, self._epoch)

    def _is_complete(self, step: int, name: str) -> bool:
        """Returns whether no more values of this step are to come: all that log the name have, or have gone on."""
        if len(self._open[step, name]) >= self._loggers.get(name, 1 << 30):
            return True
        later = sum(1 for other, its_name in self._open if its_name == name and other > step)
        return later >= _STEPS_OPEN

    def growing(self) -> Growing[Point]:
        """Returns the points of all curves, in the order in which they came."""
        return self._growing

    def _add(self, point: Point) -> None:
        curve = self._thinned[point.name]
        epoch = curve.epoch
        if curve.points and point.step <= curve.points[-1].step:  # after a restart, from an earlier step
            curve = self._thinned[point.name] = curve.until(point.step)
        done = curve.add(point)
        if curve.epoch == epoch:
            self._points += done
        else:  # all points of this curve are new
            self._points = [each for other in self._thinned.values() for each in other.points]
            self._epoch += 1


def _short(value: float) -> float:
    """Returns the value with as many digits as a chart can show."""
    return float(f"{value:.6g}")


_QUIET_S = 10.0  # so long without any record, all ranks are said to make no progress
_AWAY = (RankActivity.STARTING, RankActivity.DEAD, RankActivity.ENDED)


def header_of(
    facts: JobInfo, ranks: tuple[RankSample, ...], verdict: StallNotice | None, now_s: float, step_s: float | None
) -> JobHeader:
    """Returns the header.

    Args:
        facts: the job.
        ranks: the latest sample of each rank.
        verdict: why the job does not get on, if it does not.
        now_s: now, on the job's clock.
        step_s: what a step takes now; None while no two are finished.
    """
    step = max((each.step for each in ranks if each.step is not None), default=None)
    here = sum(each.state not in _AWAY for each in ranks)
    total = facts.total_steps
    left_s = None
    if step is not None and total is not None and step_s is not None and not facts.outcome and verdict is None:
        left_s = max(0, total - step) * step_s
    quiet_s = now_s - max((each.heard_s for each in ranks), default=now_s)
    mood = _mood(facts, ranks, verdict, quiet_s)
    words = [_doing(facts, ranks, verdict, quiet_s, now_s)]
    if step is not None:
        words.append(f"step {step:,}" if total is None else f"step {step:,} of {total:,}")
    if not facts.outcome:
        words.append(f"{here} of {facts.world_size} {'rank' if facts.world_size == 1 else 'ranks'}")
    if facts.restarts:
        words.append("1 restart" if facts.restarts == 1 else f"{facts.restarts} restarts")
    if left_s is not None:
        words.append(f"about {about(left_s)} left" if left_s >= 1 else "nearly done")
    return JobHeader(
        sentence=", ".join(words),
        mood=mood,
        run_id=facts.run_id,
        command=facts.command,
        security=facts.security,
        step=step,
        total_steps=total,
        share=min(1.0, step / total) if step is not None and total else None,
        ranks_here=here,
        world_size=facts.world_size,
        restarts=facts.restarts,
        elapsed_s=round(now_s - facts.started_s, 1),
        left_s=left_s,
    )


def _mood(facts: JobInfo, ranks: tuple[RankSample, ...], verdict: StallNotice | None, quiet_s: float) -> str:
    if facts.outcome:
        return "over" if facts.outcome in ("finished", "stopped") else "bad"
    if verdict is not None or any(each.state is RankActivity.DEAD for each in ranks):
        return "bad"
    if quiet_s > _QUIET_S or not any(each.step is not None or each.state is RankActivity.RUNNING for each in ranks):
        return "waiting"
    return "good"


def _doing(
    facts: JobInfo, ranks: tuple[RankSample, ...], verdict: StallNotice | None, quiet_s: float, now_s: float
) -> str:
    if facts.outcome:
        return f"{facts.outcome} after {about(now_s - facts.started_s)}"
    if verdict is not None:
        return f"stuck for {about(max(quiet_s, now_s - verdict.at_s))}"
    if not any(each.step is not None for each in ranks):
        return "starting" if all(each.state is RankActivity.STARTING for each in ranks) else "running"
    return f"no progress for {about(quiet_s)}" if quiet_s > _QUIET_S else "training"


_FEWEST_STEPS = 5
_WORTH_SAYING = 0.03  # of a step


def what_if(steps: Sequence[StepColumn]) -> WhatIf | None:
    """Returns the rank whose slowness costs most in these steps; None if none costs much."""
    if len(steps) < _FEWEST_STEPS:
        return None
    costs: dict[int, float] = {}
    for column in steps:
        slowest, cost = _cost_of(column)
        if slowest is not None:
            costs[slowest] = costs.get(slowest, 0.0) + cost
    if not costs:
        return None
    rank = max(costs, key=lambda each: costs[each])
    now = fmean(column.duration for column in steps)
    then = now - costs[rank] / len(steps)
    if now - then < _WORTH_SAYING * now:
        return None
    less = (now - then) / now
    sentence = (
        f"If rank {rank} ran like the median, a step would take {milliseconds(then)} instead of {milliseconds(now)} "
        f"({less:.0%} less)."
    )
    return WhatIf(sentence, rank, round(now, 2), round(then, 2))


def _cost_of(column: StepColumn) -> tuple[int | None, float]:
    """Returns the slowest rank of a step, and how much shorter the step would be if the rank were like the median."""
    own = sorted((time, rank) for rank, time in enumerate(column.compute) if time is not None)
    if len(own) < 2:
        return None, 0.0
    (longest, rank), (second, _) = own[-1], own[-2]
    return rank, longest - max(second, median(time for time, _ in own))


_STEPS_KEPT = 240
_LINES_KEPT = 2000
_EVENTS_KEPT = 500
_RECENT = 30  # steps over which medians are taken
_PATIENCE = (
    3  # samples after which a step is shown without the ranks that have not finished it; other machines lag by one
)


class DashboardAggregator:
    """Takes samples in the order in which they were made, and returns the picture, with so many of the latest steps."""

    def __init__(self, steps_kept: int = _STEPS_KEPT) -> None:
        self._sample: JobSample | None = None
        self._ranks: dict[int, RankSample] = {}
        self._open: dict[int, dict[int, RankStep]] = {}  # by step and rank, until every rank has finished it
        self._latest: dict[int, RankStep] = {}  # the step of the timeline, by rank
        self._recent: dict[int, deque[RankStep]] = {}
        self._shown_up_to = -1
        self._steps: Tail[StepColumn] = Tail(steps_kept)
        self._story: Tail[JobEvent] = Tail(_EVENTS_KEPT)
        self._log: Tail[Line] = Tail(_LINES_KEPT)
        self._taken = 0  # samples
        self._seen: dict[int, int] = {}  # of each open step, the number of the first sample that had it
        self._stacks: dict[int, Stack] = {}
        self._curves = Curves()
        self._calls = CallTable()

    def take(self, sample: JobSample) -> None:
        """Takes the next sample."""
        self._sample = sample
        self._taken += 1
        self._story.extend(sample.events)
        self._log.extend(sample.lines)
        self._stacks.update((each.rank, each) for each in sample.stacks)
        for each in sample.ranks:
            self._ranks[each.rank] = replace(each, steps=(), values=(), calls=())
            recent = self._recent.setdefault(each.rank, deque(maxlen=_RECENT))
            recent.extend(each.steps)
            for step in each.steps:
                self._open.setdefault(step.step, {})[each.rank] = step
                self._seen.setdefault(step.step, self._taken)
        self._begin_again(sample)
        for rank in set(self._ranks) - {each.rank for each in sample.ranks}:
            del self._ranks[rank]
        self._curves.take(sample.ranks)
        self._calls.take(sample.ranks)
        self._close_steps()

    def picture(self) -> DashboardState:
        """Returns what there is to see.

        Raises:
            ValueError: no sample has been taken yet.
        """
        sample = self._sample
        if sample is None:
            raise ValueError("the board has taken no sample yet, so there is nothing to show")
        steps = self._steps.growing()
        recent = steps.items[-_RECENT:]
        rates = {rank: _samples_per_s(kept) for rank, kept in self._recent.items()}
        figures = _figures(recent, self._recent, sum(rates.values()))
        step_s = figures.step / 1e3 if figures is not None else None
        ranks = tuple(self._ranks[rank] for rank in sorted(self._ranks))
        links, network = rows_of(sample.links, {each.rank: each.host for each in ranks})
        return DashboardState(
            header=header_of(sample.facts, ranks, sample.verdict, sample.now_s, step_s),
            figures=figures,
            ranks=self._rows(sample, recent, rates),
            what_if=what_if(recent),
            steps=steps,
            timeline=_timeline(self._latest),
            curves=self._curves.growing(),
            links=links,
            network=network,
            calls=self._calls.rows(),
            story=self._story.growing(),
            log=self._log.growing(),
            verdict=sample.verdict,
            stacks=tuple(self._stacks[rank] for rank in sorted(self._stacks)),
        )

    def _begin_again(self, sample: JobSample) -> None:
        """Forgets what was shown before a restart, after which the steps are counted from the beginning."""
        now = [each.step for each in sample.ranks if each.step is not None]
        if now and max(now) < self._shown_up_to:
            self._shown_up_to = -1
        for step in [step for step in self._open if step <= self._shown_up_to]:
            del self._open[step], self._seen[step]

    def _close_steps(self) -> None:
        """Makes columns of the steps that every rank has finished, and of those that some rank will never finish."""
        columns = []
        for step in sorted(self._open):
            finished = self._open[step]
            if len(finished) < len(self._ranks) and self._taken - self._seen[step] < _PATIENCE:
                break
            del self._open[step], self._seen[step]
            self._shown_up_to = step
            self._latest = finished
            columns.append(_column(step, finished))
        self._steps.extend(columns)

    def _rows(
        self, sample: JobSample, recent: tuple[StepColumn, ...], rates: Mapping[int, float]
    ) -> tuple[RankRow, ...]:
        own = {rank: _own_time(rank, recent) for rank in self._ranks}
        known = [time for time in own.values() if time]
        middle = median(known) if known else 0.0
        blamed = sample.verdict.ranks if sample.verdict is not None else ()
        rows = []
        for rank in sorted(self._ranks):
            each = self._ranks[rank]
            waits = [column.wait[rank] or 0.0 for column in recent if rank < len(column.wait)]
            rows.append(
                RankRow(
                    rank=rank,
                    host=each.host,
                    pid=each.pid,
                    state=each.state.value,
                    doing=each.doing,
                    step=each.step,
                    samples_per_s=round(rates.get(rank, 0.0), 1),
                    compute=round(own[rank], 2),
                    wait=round(_mean(waits), 2),
                    slowness=round(own[rank] / middle, 3) if middle else 1.0,
                    memory_nbytes=each.memory_nbytes,
                    heard_s=round(max(0.0, sample.now_s - each.heard_s), 1),
                    is_blamed=rank in blamed,
                )
            )
        return tuple(rows)


def _own_time(rank: int, recent: tuple[StepColumn, ...]) -> float:
    known = [time for column in recent if rank < len(column.compute) if (time := column.compute[rank]) is not None]
    return _mean(known)


def _mean(numbers: list[float]) -> float:
    """Returns the mean, 0 of nothing; fmean is exact, and ten times as slow."""
    return sum(numbers) / len(numbers) if numbers else 0.0


def _samples_per_s(steps: deque[RankStep]) -> float:
    samples = sum([step.samples for step in steps])
    took_s = sum([step.end_s - step.begin_s for step in steps])  # steps between the first and the last may be left out
    return samples / took_s if took_s > 0 and samples else 0.0


def _column(step: int, finished: dict[int, RankStep]) -> StepColumn:
    width = max(finished) + 1
    compute: list[float | None] = [None] * width
    wait: list[float | None] = [None] * width
    for rank, each in finished.items():
        compute[rank], wait[rank] = in_ms(each.compute_s), in_ms(each.exposed_s)
    parts = [_parts_of(each) for each in finished.values()]
    predicted = [each.predicted_s for each in finished.values() if each.predicted_s is not None]
    return StepColumn(
        step=step,
        duration=in_ms(fmean(each.duration_s for each in finished.values())),
        parts=tuple(in_ms(fmean(column)) for column in zip(*parts, strict=True)),
        compute=tuple(compute),
        wait=tuple(wait),
        predicted=in_ms(fmean(predicted)) if len(predicted) == len(finished) else None,
    )


def _parts_of(step: RankStep) -> tuple[float, ...]:
    """Returns seconds in the order of `PARTS`."""
    named = (step.data_s, step.forward_s, step.backward_s, step.exposed_s, step.optimizer_s)
    return (*named, max(0.0, step.duration_s - sum(named)))


def _figures(
    recent: tuple[StepColumn, ...], steps: Mapping[int, deque[RankStep]], samples_per_s: float
) -> Figures | None:
    if not recent:
        return None
    duration = median(column.duration for column in recent)
    parts = tuple(round(median(part), 2) for part in zip(*(column.parts for column in recent), strict=True))
    predicted = [column.predicted for column in recent if column.predicted is not None]
    latest = [each for kept in steps.values() for each in kept]
    communication = sum(each.communication_s for each in latest)
    exposed = sum(each.exposed_s for each in latest)
    took = sum(each.duration_s for each in latest)
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
    begin_s = min(each.begin_s for each in latest.values())
    end_s = max(each.end_s for each in latest.values())

    def at(time_s: float) -> float:
        return round((time_s - begin_s) * 1e3, 3)

    lanes = []
    for rank in sorted(latest):
        each = latest[rank]
        phases = tuple((name, at(begin), at(end)) for name, begin, end in each.phases)
        buckets = tuple((at(one.ready_s), at(one.sent_s), at(one.done_s), one.nbytes, one.name) for one in each.buckets)
        lanes.append(TimelineLane(rank, phases, buckets))
    return Timeline(next(iter(latest.values())).step, at(end_s), tuple(lanes))
