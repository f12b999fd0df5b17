"""Reads the directory of a job, while it runs or afterwards, into the same sample as a look at a running job."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.observe.live.board import Board
from paceline.observe.live.follower import Follower, News
from paceline.observe.live.lookout import TOTAL_STEPS
from paceline.observe.live.picture import Picture
from paceline.observe.live.sample import Event, Facts, Line, Link, RankSample, Sample, State, Verdict
from paceline.observe.live.story import Story
from paceline.observe.reading import SUFFIX, memory_of
from paceline.observe.runs import EVENTS_FILE, JOB_FILE

_ATTEMPT = re.compile(r"attempt_(\d+)")
_LAST_LINES = 400  # of each stream of each rank
_STEPS_KEPT = 2000


class NothingRecordedError(ValueError):
    """A directory holds no recordings that can be read."""


def picture_of(directory: Path, verdict: Verdict | None = None) -> Picture:
    """Returns the picture of the job in a directory; of several attempts, it shows the last one.

    Args:
        directory: a job's directory, as `paceline runs` lists them.
        verdict: why the job failed, if that is known.

    Raises:
        NothingRecordedError: there are no recordings in it.
    """
    recordings = dict(_recordings(directory))
    if not recordings:
        raise NothingRecordedError(
            f"{directory} holds no recordings; give the directory of a job, which `paceline runs` lists, or its copy"
        )
    told = _job(directory)
    news = {rank: each for rank, (_, each) in recordings.items()}
    now_s = max(each.heard_s for each in news.values())
    was_stopped = told.get("state") == "stopped"
    ranks = tuple(_sample(rank, *recordings[rank], was_stopped) for rank in sorted(recordings))
    links = tuple(link for rank in sorted(news) for link in _links(rank, news[rank]))
    if was_stopped:
        verdict = None  # how the ranks were found when they were asked to end is no fault
    board = Board(steps_kept=_STEPS_KEPT)
    board.take(
        Sample(
            now_s,
            _facts(directory, told, news, ranks, now_s),
            ranks,
            links,
            verdict=verdict,
            **_told(directory, told, now_s),
        )
    )
    return board.picture()


def _recordings(directory: Path) -> Iterator[tuple[int, tuple[Follower, News]]]:
    """Yields what can be read of the ranks' recordings; of a rank's several, the last attempt's counts."""
    for path in sorted(directory.rglob(f"*{SUFFIX}"), key=_attempt):
        try:
            data = memory_of(path)
        except OSError:
            continue
        follower = Follower(functools.partial(_part, data), is_whole=True)
        news = follower.news()
        if news is not None:
            number = follower.rank if follower.rank is not None else _number_of(path)
            yield number, (follower, news)


def _part(data: bytes, offset: int, nbytes: int) -> bytes:
    return data[offset : offset + nbytes]


def _attempt(path: Path) -> tuple[int, str]:
    found = _ATTEMPT.search(str(path))
    return (int(found[1]) if found else 0, str(path))


def _number_of(path: Path) -> int:
    return int(path.parent.name) if path.parent.name.isdecimal() else 0


def _links(rank: int, news: News) -> Iterator[Link]:
    """Yields what a rank sent a second, over the time that its recording still covers."""
    span_s = news.heard_s - news.steps[0].begin_s if news.steps else 0.0
    for kind, nbytes in (("shared memory", news.shm_nbytes), ("TCP", news.tcp_nbytes)):
        if nbytes and span_s > 0:
            yield Link(rank, -1, kind, round(nbytes / span_s))


def _sample(rank: int, follower: Follower, news: News, was_stopped: bool) -> RankSample:
    """Returns a rank's sample with all that its recording still holds."""
    waits = [call for call in news.open_calls if not call.is_async]
    doing = f"was in {waits[0].operation}, call {waits[0].sequence}" if waits else ""
    return RankSample(
        rank=rank,
        host=follower.host,
        pid=follower.pid,
        state=State.ENDED if news.is_ended or was_stopped else State.DEAD,
        doing=doing,
        heard_s=news.heard_s,
        step=news.step,
        steps=tuple(news.steps),
        values=tuple(value for value in news.values if value[1] != TOTAL_STEPS),
    )


def _facts(
    directory: Path, told: dict[str, Any], news: dict[int, News], ranks: tuple[RankSample, ...], now_s: float
) -> Facts:
    took_s = told.get("ended_s", 0) - told.get("started_s", 0) if "ended_s" in told else None
    first_s = min((step.begin_s for each in ranks for step in each.steps), default=now_s)
    state = str(told.get("state", "over"))
    total = max(
        (int(value) for each in news.values() for _, name, value in each.values if name == TOTAL_STEPS), default=0
    )
    return Facts(
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


def _told(directory: Path, told: dict[str, Any], now_s: float) -> dict[str, Any]:
    """Returns the events and the lines that the directory holds, with times on the recordings' clock."""
    ended_s = told.get("ended_s", 0.0)
    return {
        "events": tuple(_events(directory, float(ended_s), now_s)),
        "lines": tuple(line for path in sorted(directory.rglob("std*.log")) for line in _lines(path, now_s)),
    }


def _events(directory: Path, ended_s: float, now_s: float) -> Iterator[Event]:
    for path in sorted(directory.rglob(EVENTS_FILE)):
        story = Story()
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
