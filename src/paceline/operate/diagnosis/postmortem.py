"""Puts together what a job left behind: recordings, pictures of stalls, and how workers failed. Any may be missing."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.operate.diagnosis.clock_offset import aligned
from paceline.operate.diagnosis.job_snapshot import ExitReason, JobSnapshot, RankExitStatus, RankState
from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot, decode, job_snapshot_of
from paceline.operate.diagnosis.recording import ProcessRecording
from paceline.operate.diagnosis.recording_reader import rank_state_of, read_directory
from paceline.operate.diagnosis.runs import RunStatus as RunState
from paceline.operate.diagnosis.runs import read_run

PICTURES = "stall-*.json"  # what the launchers saw of the latest stall
_FAILURES = "error.json"


@dataclass(frozen=True)
class JobRemnants:
    """What was found in a directory.

    Attributes:
        scene: how the job was last seen, as far as it was recorded.
        ranks: every rank that recorded something, with all of its calls.
        world_size: how many ranks there were; 0 if nothing says.
        files: how many files were read.
    """

    scene: JobSnapshot
    ranks: tuple[RankState, ...]
    world_size: int
    files: int


def read_job(*directories: str | os.PathLike[str]) -> JobRemnants:
    """Returns what a job left in the directories of its machines."""
    recordings = _latest([each for directory in directories for each in read_directory(directory)])
    stalls = [path for directory in directories for path in sorted(Path(directory).rglob(PICTURES))]
    pictures = [picture for path in stalls if (picture := _picture(path)) is not None]
    failures = [path for directory in directories for path in Path(directory).rglob(_FAILURES)]
    endings = {rank: ending for path in failures for rank, ending in _failures(path)}
    ranks = aligned([rank_state_of(each) for each in recordings], [each.clock.identity for each in recordings])
    is_stopped = any(_is_stopped(Path(each)) for each in directories)
    ended = [
        replace(rank, ending=endings.get(rank.rank) or (None if is_stopped else _ending(rank, ranks, recording)))
        for rank, recording in zip(ranks, recordings, strict=True)
    ]
    size = max((each.world_size or 0 for each in recordings), default=0)
    stall = job_snapshot_of(pictures)
    is_a_stall = bool(stall.ranks) and not any(rank.ending is not None for rank in ended)
    scene = (
        _with_the_unseen(stall, ended)
        if is_a_stall
        else JobSnapshot(0.0, tuple(replace(r, since_s=None) for r in ended))
    )
    return JobRemnants(scene, tuple(ranks), size, len(recordings) + len(pictures) + len(endings))


def _is_stopped(directory: Path) -> bool:
    """Returns whether a signal ended the job. Its workers then saw each other end, in an order that means nothing."""
    run = read_run(directory)
    return run is not None and run.state is RunState.STOPPED


def _latest(recordings: Sequence[ProcessRecording]) -> list[ProcessRecording]:
    """Returns the latest recording of each rank: those of the last attempt."""
    by_rank = {
        each.rank: each for each in sorted(recordings, key=lambda each: each.started_ns) if each.rank is not None
    }
    return [by_rank[rank] for rank in sorted(by_rank)]


def _with_the_unseen(stall: JobSnapshot, ranks: Sequence[RankState]) -> JobSnapshot:
    """Adds the ranks that a stall's pictures do not show."""
    seen = {rank.rank for rank in stall.ranks}
    more = tuple(replace(rank, since_s=None) for rank in ranks if rank.rank not in seen)
    return replace(stall, ranks=tuple(sorted((*stall.ranks, *more), key=lambda rank: rank.rank)))


def _ending(rank: RankState, ranks: Sequence[RankState], recording: ProcessRecording) -> RankExitStatus | None:
    """Returns how a rank ended that left no failure, by what the others saw of it; None if that says nothing.

    The time is that of the day, as in the files of the launcher.
    """
    failed = [call for call in rank.calls if call.is_open and call.ended_s is not None]
    at_s = recording.clock.realtime_ns(recording.written_ns or recording.started_ns) * 1e-9
    if failed:
        mismatch = failed[-1].outcome == "mismatch"
        return RankExitStatus(ExitReason.MISMATCH if mismatch else ExitReason.CONSEQUENCE, at_s, failed[-1].outcome)
    is_missed = any(
        call.outcome == "peer_lost" and call.group in rank.seats and rank.seats[call.group].number in call.missing
        for other in ranks
        for call in other.calls
    )
    if not is_missed:
        return None
    if recording.is_ended:
        return RankExitStatus(ExitReason.FINISHED, at_s)
    return RankExitStatus(ExitReason.KILLED, at_s, "it was killed or crashed, and left no traceback")


def _picture(path: Path) -> MachineSnapshot | None:
    with contextlib.suppress(OSError, ValueError):
        return decode(path.read_text())
    return None


def _failures(path: Path) -> list[tuple[int, RankExitStatus]]:
    """Returns the failure in a file that the launcher wrote, with its rank."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text())
        record = found["record"]
        how = record["text"].rstrip().rpartition("\n")[2] if record else found["how"]
        manner = ExitReason[found["manner"]] if "manner" in found else ExitReason.EXITED
        return [(int(found["rank"]), RankExitStatus(manner, float(found["seen_s"]), how, found.get("line", "")))]
    return []
