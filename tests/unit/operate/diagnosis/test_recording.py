"""Recordings of a process: location, concurrent reading, and lack of space."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from paceline import _core
from paceline.comm.record import layout
from paceline.comm.record.layout import EventKind
from paceline.comm.record.recorder import MOST_FILES, HandedMemory
from paceline.operate.diagnosis.recording import CallStatus, Clock, Pair, ProcessRecording
from paceline.operate.diagnosis.recording_reader import NoRecordingError, parse, read, read_directory, read_live

CALLS = """
import paceline, os, signal
from paceline import _core
from paceline.comm.record import recorder
recorder.begin()
recorder.identify(3, 8)
group = recorder.open_group("mine", "test", 7, 1, [2, 3])
def call(operation, sequence):
    return _core.RecordedCall(group, operation, 11, 0, sequence, 1000, -1, False, -1)
done = call(1, 1)
done.start()
done.end(0)
failed = call(2, 2)
failed.end(2)
running = call(9, 3)
running.start()
"""


def run(code: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PACELINE_RECORD_DIR": str(directory), **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


def recorded(code: str, directory: Path, **variables: str) -> ProcessRecording:
    done = run(code, directory, **variables)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    (path,) = directory.iterdir()
    return read(path)


def test_the_reader_and_the_core_agree_about_the_layout(tmp_path):
    assert _core.RECORDING_NBYTES == layout.NBYTES
    recording = recorded(CALLS, tmp_path)
    assert (recording.rank, recording.world_size, recording.is_ended) == (3, 8, True)
    assert recording.host == os.uname().nodename
    (group,) = recording.groups.values()
    assert (group.name, group.engine, group.identity, group.rank, group.ranks) == ("mine", "test", 7, 1, (2, 3))
    assert [(call.operation, call.sequence, call.state, call.outcome) for call in recording.calls] == [
        ("all_reduce", 1, CallStatus.DONE, "ok"),
        ("broadcast", 2, CallStatus.FAILED, "timed_out"),
        ("barrier", 3, CallStatus.RUNNING, None),
    ]
    assert all((call.dtype, call.reduction, call.count) == ("float32", "sum", 1000) for call in recording.calls)
    (stuck,) = recording.open_calls()
    assert stuck.operation == "barrier" and stuck.arrived_ns <= stuck.started_ns


def test_a_killed_process_leaves_its_last_call(tmp_path):
    recording = recorded(f"{CALLS}\nos.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert not recording.is_ended
    assert recording.calls[-1].operation == "barrier" and not recording.calls[-1].is_over


def test_times_are_those_of_the_monotonic_clock(tmp_path):
    code = f"import time; before = time.monotonic_ns(){CALLS}\nprint(before, time.monotonic_ns(), time.time_ns())"
    done = run(code, tmp_path)
    before, after, realtime = map(int, done.stdout.split())
    (path,) = tmp_path.iterdir()
    recording = read(path)
    tolerance_ns = 1_000_000
    assert before - tolerance_ns < recording.calls[0].arrived_ns < after + tolerance_ns
    seen = recording.clock.realtime_ns(after)
    assert abs(seen - realtime) < 50_000_000


def test_spans_and_numbers_are_recorded_with_their_step(tmp_path):
    code = """
import paceline, torch
from paceline.comm.record.spans import STEPS
class Loop: pass
loop, other = Loop(), Loop()
STEPS.begin(loop, "mine")
STEPS.begin(other, "not the maker")
@paceline.span("whole")
def function():
    with paceline.span("part"):
        paceline.log(loss=torch.ones(1, requires_grad=True) / 4, lr=3)
function()
STEPS.begin(loop, "mine")
"""
    recording = recorded(code, tmp_path)
    assert recording.step == 2
    facts = [(event.kind, event.name, event.value, event.step) for event in recording.events]
    assert facts == [
        (EventKind.STEP, "mine", None, 1),
        (EventKind.SPAN, "whole", None, 1),
        (EventKind.SPAN, "part", None, 1),
        (EventKind.VALUE, "loss", 0.25, 1),
        (EventKind.VALUE, "lr", 3.0, 1),
        (EventKind.STEP, "mine", None, 2),
    ]
    (open_step,) = recording.open_events()
    assert open_step.first == 2
    assert recording.events[1].start_ns <= recording.events[2].start_ns <= recording.events[2].end_ns


def test_a_value_that_is_no_number_is_refused(tmp_path):
    done = run("import paceline; paceline.log(loss='much')", tmp_path)
    assert "paceline.log: loss is a str that cannot be converted to one number" in done.stderr


def test_a_forked_child_records_nothing_into_its_parents(tmp_path):
    code = """
import os, paceline
with paceline.span("parent"):
    child = os.fork()
    if child == 0:
        for _ in range(3):
            with paceline.span("child"): pass
        os._exit(0)
    os.waitpid(child, 0)
"""
    recording = recorded(code, tmp_path)
    assert [event.name for event in recording.events] == ["parent"]


def test_nothing_is_recorded_if_the_user_says_so(tmp_path):
    done = run(f"{CALLS}\nprint(_core.is_recording())", tmp_path, PACELINE_RECORD="off")
    assert done.stdout == "False\n" and not list(tmp_path.iterdir())


def test_without_room_for_a_file_a_process_goes_on(tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))"
    done = run(f"{limit}\n{CALLS}\nprint(_core.is_recording())", tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert not list(tmp_path.iterdir()), "a file without its room would end the process with SIGBUS"


def test_a_directory_of_others_is_not_used(tmp_path):
    tmp_path.chmod(0o755)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    done = run(f"{CALLS}\nprint(_core.is_recording())", shared)
    assert done.stdout == "True\n" and not list(shared.iterdir())


def test_old_files_of_processes_that_have_ended_are_removed(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for number in range(MOST_FILES + 3):
        (tmp_path / f"{number:019}-{gone.pid}.record").touch()
    mine = tmp_path / f"{0:019}-{os.getpid()}.record"
    mine.touch()
    assert run(CALLS, tmp_path).returncode == 0
    assert mine.exists()
    assert len(list(tmp_path.iterdir())) <= MOST_FILES + 1


def test_memory_that_a_launcher_keeps_is_used(tmp_path):
    fd = os.memfd_create("test")
    try:
        os.truncate(fd, layout.NBYTES)
        handed = HandedMemory(fd, os.fstat(fd).st_ino, os.getpid())
        with pytest.raises(NoRecordingError):
            read_live(fd)
        assert run(CALLS, tmp_path, PACELINE_RECORD_FD=str(handed)).returncode == 0
        assert [call.sequence for call in read_live(fd).calls] == [1, 2, 3]
        assert not list(tmp_path.iterdir())
        # A process that is started after the first has ended takes its place.
        assert run(CALLS, tmp_path, PACELINE_RECORD_FD=str(handed)).returncode == 0
        assert [call.sequence for call in read_live(fd).calls] == [1, 2, 3]
        # Another file under the same number is not written to.
        wrong = HandedMemory(fd, handed.inode + 1, os.getpid())
        assert run(CALLS, tmp_path, PACELINE_RECORD_FD=str(wrong)).returncode == 0
        assert len(list(tmp_path.iterdir())) == 1
    finally:
        os.close(fd)


def test_files_that_are_no_recordings_are_passed_over(tmp_path):
    recorded(CALLS, tmp_path)
    (path,) = tmp_path.iterdir()
    (tmp_path / "compressed.record").write_bytes(zlib.compress(path.read_bytes()))
    (tmp_path / "broken.record").write_bytes(path.read_bytes()[:5000])
    (tmp_path / "empty.record").touch()
    (tmp_path / "other.record").write_bytes(b"x" * 100)
    assert [each.rank for each in read_directory(tmp_path)] == [3, 3]
    with pytest.raises(NoRecordingError, match=r"other.record is not a Paceline recording"):
        read(tmp_path / "other.record")


def test_an_entry_that_was_being_written_is_left_out(tmp_path):
    recorded(CALLS, tmp_path)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    offset = layout.HEADER.unpack_from(data)[10]
    (stamp,) = struct.unpack_from("<Q", data, offset)
    struct.pack_into("<Q", data, offset, stamp & ~3 | layout.WRITING)
    recording = parse(bytes(data))
    assert [call.sequence for call in recording.calls] == [2, 3] and recording.torn == 1


def test_a_clock_converts_ticks_between_and_beyond_its_pairs():
    clock = Clock("here", 0, (Pair(1000, 0, 500), Pair(3000, 1000, 1600), Pair(4000, 2000, 2600)))
    assert [clock.monotonic_ns(tick) for tick in (1000, 2000, 3500)] == [0, 500, 1500]
    assert clock.monotonic_ns(0) is None
    assert clock.realtime_ns(100) == 600 and clock.realtime_ns(1500) == 2100
    assert [clock.monotonic_ns(tick) for tick in (500, 4600)] == [-333, 2400]  # by the slope of all pairs


def test_a_shifted_recording_has_all_its_times_moved(tmp_path):
    recording = recorded(CALLS, tmp_path)
    moved = recording.shifted(1_000_000)
    for before, after in zip(recording.calls, moved.calls, strict=True):
        assert after.arrived_ns - before.arrived_ns == 1_000_000
        assert (after.ended_ns is None) == (before.ended_ns is None)
    assert moved.groups[1].opened_ns - recording.groups[1].opened_ns == 1_000_000
    assert moved.clock.realtime_ns(moved.started_ns) == recording.clock.realtime_ns(recording.started_ns)
