"""Keeps what a job's picture is made of, from one sample to the next. It has neither files nor sockets nor a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean, median

from paceline.observe.live.calls import CallTable
from paceline.observe.live.curves import Curves
from paceline.observe.live.header import header_of
from paceline.observe.live.links import rows_of
from paceline.observe.live.picture import Figures, Lane, Picture, RankRow, StepColumn, Timeline, in_ms
from paceline.observe.live.sample import Event, Line, RankSample, RankStep, Sample, Stack
from paceline.observe.live.tail import Tail
from paceline.observe.live.what_if import what_if

_STEPS_KEPT = 240
_LINES_KEPT = 2000
_EVENTS_KEPT = 500
_RECENT = 30  # steps over which medians are taken
_PATIENCE = (
    3  # samples after which a step is shown without the ranks that have not finished it; other machines lag by one
)


class Board:
    """Takes samples in the order in which they were made, and returns the picture, with so many of the latest steps."""

    def __init__(self, steps_kept: int = _STEPS_KEPT) -> None:
        self._sample: Sample | None = None
        self._ranks: dict[int, RankSample] = {}
        self._open: dict[int, dict[int, RankStep]] = {}  # by step and rank, until every rank has finished it
        self._latest: dict[int, RankStep] = {}  # the step of the timeline, by rank
        self._recent: dict[int, deque[RankStep]] = {}
        self._shown_up_to = -1
        self._steps: Tail[StepColumn] = Tail(steps_kept)
        self._story: Tail[Event] = Tail(_EVENTS_KEPT)
        self._log: Tail[Line] = Tail(_LINES_KEPT)
        self._taken = 0  # samples
        self._seen: dict[int, int] = {}  # of each open step, the number of the first sample that had it
        self._stacks: dict[int, Stack] = {}
        self._curves = Curves()
        self._calls = CallTable()

    def take(self, sample: Sample) -> None:
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

    def picture(self) -> Picture:
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
        return Picture(
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

    def _begin_again(self, sample: Sample) -> None:
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

    def _rows(self, sample: Sample, recent: tuple[StepColumn, ...], rates: Mapping[int, float]) -> tuple[RankRow, ...]:
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
        lanes.append(Lane(rank, phases, buckets))
    return Timeline(next(iter(latest.values())).step, at(end_s), tuple(lanes))
