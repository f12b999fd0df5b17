"""Reads the directories of a job, while it runs or afterwards, into the same sample as a look at a running job."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.comm.record.memory import SUFFIX
from paceline.operate.dashboard.aggregator import DashboardAggregator
from paceline.operate.dashboard.dashboard_state import DashboardState
from paceline.operate.dashboard.event_queue import TOLD_BY_ALL, EventFormatter
from paceline.operate.dashboard.job_sample import (
    JobEvent,
    JobInfo,
    JobSample,
    Line,
    LinkRate,
    RankActivity,
    RankSample,
    StallNotice,
)
from paceline.operate.dashboard.link_rates import SHARED_MEMORY, TCP, links_over
from paceline.operate.dashboard.local_collector import TOTAL_STEPS
from paceline.operate.dashboard.recording_follower import RecordingFollower, RecordingUpdate
from paceline.operate.diagnosis.recording_reader import (
    NoRecordingError,
    RecordingSource,
    machines_in,
    memory_of,
    shifts_of,
    source_of,
)
from paceline.operate.diagnosis.runs import EVENTS_FILE, JOB_FILE

_ATTEMPT = re.compile(r"attempt_(\d+)")
_LAST_LINES = 400  # of each stream of each rank
_STEPS_KEPT = 2000


class NothingRecordedError(ValueError):
    """A directory holds no recordings that can be read."""


@dataclass(frozen=True)
class _Recorded:
    """What one rank recorded, in the file `path`, with times on the job's clock."""

    path: Path
    follower: RecordingFollower
    news: RecordingUpdate


def dashboard_of(directories: Sequence[Path], verdict: StallNotice | None = None) -> DashboardState:
    """Returns the picture of the job in the directories of its machines; of several attempts, it shows the last one.

    Args:
        directories: the job's, as `paceline runs` lists them on each machine.
        verdict: why the job failed, if that is known.

    Raises:
        NothingRecordedError: there are no recordings in them.
    """
    recordings = _recordings(directories)
    if not recordings:
        raise NothingRecordedError(
            f"{' and '.join(map(str, directories))} holds no recordings; give the directory of a job, which `paceline "
            "runs` lists, or its copy"
        )
    told = next((each for directory in directories if (each := _job(directory))), {})
    now_s = max(each.news.heard_s for each in recordings.values())
    was_stopped = told.get("state") == "stopped"
    ranks = tuple(_sample(rank, recordings[rank], was_stopped) for rank in sorted(recordings))
    links = tuple(link for rank in sorted(recordings) for link in _links(rank, recordings[rank].news))
    if was_stopped:
        verdict = None  # how the ranks were found when they were asked to end is no fault
    stories = [_told(directory, at == 0, recordings.values()) for at, directory in enumerate(directories)]
    events = sorted((event for told_there, _ in stories for event in told_there), key=lambda event: event.at_s)
    lines = tuple(line for _, lines_there in stories for line in lines_there)
    facts = _facts(directories[0], told, recordings, ranks, now_s)
    board = DashboardAggregator(steps_kept=_STEPS_KEPT)
    board.take(JobSample(now_s, facts, ranks, links, tuple(events), lines, verdict))
    return board.picture()


def _recordings(directories: Sequence[Path]) -> dict[int, _Recorded]:
    """Returns what can be read of the ranks' recordings; of a rank's several, the last attempt's counts."""
    found: list[tuple[RecordingSource, bytes]] = []
    for path in sorted((path for each in directories for path in each.rglob(f"*{SUFFIX}")), key=_attempt):
        with contextlib.suppress(OSError, NoRecordingError):
            data = memory_of(path)
            found.append((source_of(data, path), data))
    shifts, _ = shifts_of([place for place, _ in found], machines_in(directories))
    recordings = {}
    for (place, data), shift_ns in zip(found, shifts, strict=True):
        follower = RecordingFollower(functools.partial(_part, data), is_whole=True, shift_s=shift_ns / 1e9)
        news = follower.news()
        if news is not None:
            number = follower.rank if follower.rank is not None else _number_of(place.path)
            recordings[number] = _Recorded(place.path, follower, news)
    return recordings


def _part(data: bytes, offset: int, nbytes: int) -> bytes:
    return data[offset : offset + nbytes]


def _attempt(path: Path) -> tuple[int, str]:
    found = _ATTEMPT.search(str(path))
    return (int(found[1]) if found else 0, str(path))


def _number_of(path: Path) -> int:
    return int(path.parent.name) if path.parent.name.isdecimal() else 0


def _links(rank: int, news: RecordingUpdate) -> Iterator[LinkRate]:
    """Yields what a rank sent a second, over the time that its recording still covers."""
    span_s = news.heard_s - news.steps[0].begin_s if news.steps else 0.0
    if span_s <= 0:
        return
    if news.shm_nbytes:
        yield LinkRate(rank, -1, SHARED_MEMORY, news.shm_nbytes / span_s)
    if news.links:
        yield from links_over(rank, news.links, span_s)
    elif news.tcp_nbytes:
        yield LinkRate(rank, -1, TCP, news.tcp_nbytes / span_s)


def _sample(rank: int, recorded: _Recorded, was_stopped: bool) -> RankSample:
    """Returns a rank's sample with all that its recording still holds."""
    news = recorded.news
    waits = [call for call in news.open_calls if not call.is_async]
    doing = f"was in {waits[0].operation}, call {waits[0].sequence}" if waits else ""
    return RankSample(
        rank=rank,
        host=recorded.follower.host,
        pid=recorded.follower.pid,
        state=RankActivity.ENDED if news.is_ended or was_stopped else RankActivity.DEAD,
        doing=doing,
        heard_s=news.heard_s,
        step=news.step,
        steps=tuple(news.steps),
        values=tuple(value for value in news.values if value[1] != TOTAL_STEPS),
        calls=tuple(news.calls),
    )


def _facts(
    directory: Path,
    told: dict[str, Any],
    recordings: Mapping[int, _Recorded],
    ranks: tuple[RankSample, ...],
    now_s: float,
) -> JobInfo:
    took_s = told.get("ended_s", 0) - told.get("started_s", 0) if "ended_s" in told else None
    first_s = min((step.begin_s for each in ranks for step in each.steps), default=now_s)
    state = str(told.get("state", "over"))
    values = (value for each in recordings.values() for value in each.news.values)
    total = max((int(value) for _, name, value in values if name == TOTAL_STEPS), default=0)
    return JobInfo(
        total_steps=total or None,
        run_id=str(told.get("job", directory.name)),
        command=" ".join(["paceline run", *map(str, told.get("command", ()))]) if told.get("command") else "",
        world_size=len(ranks),
        started_s=now_s - took_s if took_s is not None else first_s,
        outcome=state if state != "running" else "",
    )


def _job(directory: Path) -> dict[str, Any]:
    """Returns what the launcher wrote down of the job; nothing if there is nothing."""
    for path in sorted(directory.rglob(JOB_FILE)):
        try:
            told = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(told, dict):
            return told
    return {}


def _told(directory: Path, is_first: bool, recordings: Iterable[_Recorded]) -> tuple[list[JobEvent], list[Line]]:
    """Returns the events and the lines that one directory holds, with times on the job's clock.

    What every machine's launcher tells is taken from the first directory only.
    """
    here = [each.news.heard_s for each in recordings if each.path.is_relative_to(directory)]
    now_s, ended_s = max(here, default=0.0), float(_job(directory).get("ended_s", 0.0))
    events = [event for event in _events(directory, ended_s, now_s) if is_first or event.kind not in TOLD_BY_ALL]
    return events, [line for path in sorted(directory.rglob("std*.log")) for line in _lines(path, now_s)]


def _events(directory: Path, ended_s: float, now_s: float) -> Iterator[JobEvent]:
    for path in sorted(directory.rglob(EVENTS_FILE)):
        story = EventFormatter()
        for text in path.read_text(errors="replace").splitlines():
            try:
                fields = json.loads(text)
                at_s = now_s + float(fields["time_s"]) - ended_s if ended_s else now_s
                yield from story.tell(str(fields["event"]), fields, at_s)
            except (ValueError, KeyError, TypeError):
                continue


def _lines(path: Path, now_s: float) -> Iterator[Line]:
    stream = 2 if path.name.startswith("stderr") else 1
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _LAST_LINES * 200))
        kept = file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
    for text in kept:
        yield Line(now_s, _number_of(path), stream, text)
