"""State of a job that has ended, read from its recordings, stall snapshots and failure files. Files may be missing."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.operate.diagnosis.clock_offset import aligned
from paceline.operate.diagnosis.diagnosis import diagnose
from paceline.operate.diagnosis.finding import Diagnosis
from paceline.operate.diagnosis.job_snapshot import ExitReason, JobSnapshot, RankExitStatus, RankState
from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot, decode, job_snapshot_of
from paceline.operate.diagnosis.recording import ProcessRecording
from paceline.operate.diagnosis.recording_reader import machines_in, rank_state_of, read_directory
from paceline.operate.diagnosis.runs import RunStatus, files_of_job

_STALLS = "stall-*.json"  # the snapshots of the latest stall, written by the launchers
_FAILURES = "error.json"


@dataclass(frozen=True)
class PostmortemData:
    """The data that a job left in its directories.

    Attributes:
        snapshot: the last known state of the job.
        ranks: the state of every rank with a recording, including all of its calls.
        world_size: the number of ranks; 0 if unknown.
        files: the number of files read.
        is_over: whether the job has ended.
        is_stall: whether `snapshot` was taken during a stall.
        stall_ended: whether the job continued after the stall and finished.
    """

    snapshot: JobSnapshot
    ranks: tuple[RankState, ...]
    world_size: int
    files: int
    is_over: bool = True
    is_stall: bool = False
    stall_ended: bool = False


def read_job(*directories: str | os.PathLike[str]) -> PostmortemData:
    """Reads the data that a job left in its directories; each machine has one directory."""
    recordings = _latest([recording for directory in directories for recording in read_directory(directory)])
    stalls = [path for directory in directories for path in files_of_job(directory, _STALLS)]
    machines = [machine for path in stalls if (machine := _machine_snapshot(path)) is not None]
    failures = [path for directory in directories for path in files_of_job(directory, _FAILURES)]
    endings = {rank: ending for path in failures for rank, ending in _failures(path)}
    ranks = aligned(
        [rank_state_of(recording) for recording in recordings],
        [recording.clock.identity for recording in recordings],
    )
    runs = machines_in(directories)
    # After a signal, the order in which workers lost their connections to each other is meaningless.
    is_stopped = any(run.state is RunStatus.STOPPED for run in runs)
    is_over = not any(run.state is RunStatus.RUNNING for run in runs)
    lines = {rank: line for run in runs for rank, line in run.exit_lines.items()}
    ended = [
        replace(rank, ending=endings.get(rank.rank) or (None if is_stopped else _ending(rank, ranks, recording, lines)))
        for rank, recording in zip(ranks, recordings, strict=True)
    ]
    size = max((recording.world_size or 0 for recording in recordings), default=0)
    snapshot = JobSnapshot(0.0, tuple(replace(rank, since_s=None) for rank in ended))
    stall_ended = bool(runs) and all(run.state is RunStatus.FINISHED for run in runs)
    is_stall = False
    if not any(rank.ending is not None for rank in ended) and (stall := job_snapshot_of(machines)).ranks:
        seen = {rank.rank for rank in stall.ranks}
        unseen = [rank for rank in snapshot.ranks if rank.rank not in seen]
        snapshot = replace(stall, ranks=tuple(sorted((*stall.ranks, *unseen), key=lambda rank: rank.rank)))
        is_stall = True
    files = len(recordings) + len(machines) + len(endings)
    return PostmortemData(snapshot, tuple(ranks), size, files, is_over, is_stall, is_stall and stall_ended)


def verdict_on(job: PostmortemData) -> Diagnosis | None:
    """Returns the diagnosis of a job's last known state, or None if no rank is waiting and none has failed.

    A stall is described in the present tense. If the job has ended since, the message mentions this. A stall that was
    over before the job ended does not count as a fault.
    """
    found = diagnose(job.snapshot)
    if found is None or not job.is_stall or not job.is_over:
        return found
    if job.stall_ended:
        return replace(
            found,
            sentence=f"the job stalled and later continued; observed during the stall: {found.sentence}",
            is_fault=False,
        )
    return replace(found, sentence=f"observed before the job ended: {found.sentence}")


def _latest(recordings: Sequence[ProcessRecording]) -> list[ProcessRecording]:
    """Returns each rank's latest recording, which belongs to the last attempt."""
    in_order = sorted(recordings, key=lambda recording: recording.started_ns)
    by_rank = {recording.rank: recording for recording in in_order if recording.rank is not None}
    return [by_rank[rank] for rank in sorted(by_rank)]


def _ending(
    rank: RankState, ranks: Sequence[RankState], recording: ProcessRecording, exit_lines: Mapping[int, str]
) -> RankExitStatus | None:
    """Infers from the other ranks' calls how a rank without a failure file exited; returns None if this is impossible.

    The result contains the time of day, as the launcher's files do.
    """
    failed = [call for call in rank.calls if call.is_open and call.ended_s is not None]
    at_s = recording.clock.realtime_ns(recording.written_ns or recording.started_ns) * 1e-9
    if failed:
        mismatch = failed[-1].outcome == "mismatch"
        return RankExitStatus(ExitReason.MISMATCH if mismatch else ExitReason.CONSEQUENCE, at_s, failed[-1].outcome)
    is_missed = any(
        call.outcome == "peer_lost"
        and call.group in rank.memberships
        and rank.memberships[call.group].number in call.missing
        for other in ranks
        for call in other.calls
    )
    if not is_missed:
        return None
    if recording.is_ended:
        return RankExitStatus(ExitReason.FINISHED, at_s, line=exit_lines.get(rank.rank, ""))
    return RankExitStatus(ExitReason.KILLED, at_s, "it was killed or crashed, and left no traceback")


def _machine_snapshot(path: Path) -> MachineSnapshot | None:
    with contextlib.suppress(OSError, ValueError):
        return decode(path.read_text())
    return None


def _failures(path: Path) -> list[tuple[int, RankExitStatus]]:
    """Reads a rank's failure from a launcher's file; returns an empty list if the file cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text())
        ending = RankExitStatus(
            ExitReason[found["manner"]], float(found["seen_s"]), found["summary"], found["line"], found["handled"]
        )
        return [(int(found["rank"]), ending)]
    return []
