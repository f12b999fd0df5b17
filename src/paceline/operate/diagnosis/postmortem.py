"""State of a job that has ended, read from recordings, stall snapshots and failures. Any of these may be missing."""

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
from paceline.operate.diagnosis.runs import RunStatus, read_run

_STALLS = "stall-*.json"  # the snapshots of the latest stall, written by the launchers
_FAILURES = "error.json"


@dataclass(frozen=True)
class JobRemnants:
    """The data that a job left in its directories.

    Attributes:
        snapshot: the last known state of the job.
        ranks: the state of every rank with a recording, including all of its calls.
        world_size: the number of ranks; 0 if unknown.
        files: the number of files read.
    """

    snapshot: JobSnapshot
    ranks: tuple[RankState, ...]
    world_size: int
    files: int


def read_job(*directories: str | os.PathLike[str]) -> JobRemnants:
    """Reads the data that a job left in its directories; each machine has one."""
    recordings = _latest([recording for directory in directories for recording in read_directory(directory)])
    stalls = [path for directory in directories for path in sorted(Path(directory).rglob(_STALLS))]
    machines = [machine for path in stalls if (machine := _machine_snapshot(path)) is not None]
    failures = [path for directory in directories for path in Path(directory).rglob(_FAILURES)]
    endings = {rank: ending for path in failures for rank, ending in _failures(path)}
    ranks = aligned(
        [rank_state_of(recording) for recording in recordings],
        [recording.clock.identity for recording in recordings],
    )
    is_stopped = any(_is_stopped(Path(directory)) for directory in directories)
    ended = [
        replace(rank, ending=endings.get(rank.rank) or (None if is_stopped else _ending(rank, ranks, recording)))
        for rank, recording in zip(ranks, recordings, strict=True)
    ]
    size = max((recording.world_size or 0 for recording in recordings), default=0)
    snapshot = JobSnapshot(0.0, tuple(replace(rank, since_s=None) for rank in ended))
    if not any(rank.ending is not None for rank in ended) and (stall := job_snapshot_of(machines)).ranks:
        seen = {rank.rank for rank in stall.ranks}
        unseen = [rank for rank in snapshot.ranks if rank.rank not in seen]
        snapshot = replace(stall, ranks=tuple(sorted((*stall.ranks, *unseen), key=lambda rank: rank.rank)))
    return JobRemnants(snapshot, tuple(ranks), size, len(recordings) + len(machines) + len(endings))


def _is_stopped(directory: Path) -> bool:
    """Returns whether a signal ended the job. If so, the order in which workers lost each other is meaningless."""
    run = read_run(directory)
    return run is not None and run.state is RunStatus.STOPPED


def _latest(recordings: Sequence[ProcessRecording]) -> list[ProcessRecording]:
    """Returns each rank's latest recording, which belongs to the last attempt."""
    in_order = sorted(recordings, key=lambda recording: recording.started_ns)
    by_rank = {recording.rank: recording for recording in in_order if recording.rank is not None}
    return [by_rank[rank] for rank in sorted(by_rank)]


def _ending(rank: RankState, ranks: Sequence[RankState], recording: ProcessRecording) -> RankExitStatus | None:
    """Infers the exit of a rank without a failure file from the other ranks' calls; returns None if that is impossible.

    The result uses the time of day, like the launcher's files.
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


def _machine_snapshot(path: Path) -> MachineSnapshot | None:
    with contextlib.suppress(OSError, ValueError):
        return decode(path.read_text())
    return None


def _failures(path: Path) -> list[tuple[int, RankExitStatus]]:
    """Returns the rank and its failure from a file written by the launcher; empty if the file cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text())
        record = found["record"]
        how = record["text"].rstrip().rpartition("\n")[2] if record else found["how"]
        manner = ExitReason[found["manner"]] if "manner" in found else ExitReason.EXITED
        return [(int(found["rank"]), RankExitStatus(manner, float(found["seen_s"]), how, found.get("line", "")))]
    return []
