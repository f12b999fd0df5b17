"""Recordings of a process: location, concurrent reading, and lack of space."""

from __future__ import annotations

import struct
import zlib

import pytest
from recorded_programs import CALLS, recorded, run

from paceline.comm.record import layout
from paceline.operate.diagnosis.recording import Clock, Pair
from paceline.operate.diagnosis.recording_reader import NoRecordingError, parse, read, read_directory


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
    assert [clock.monotonic_ns(tick) for tick in (500, 4600)] == [-333, 2400]  # from the slope over all pairs


def test_a_shifted_recording_has_all_its_times_moved(tmp_path):
    recording = recorded(CALLS, tmp_path)
    moved = recording.shifted(1_000_000)
    for before, after in zip(recording.calls, moved.calls, strict=True):
        assert after.arrived_ns - before.arrived_ns == 1_000_000
        assert (after.ended_ns is None) == (before.ended_ns is None)
    assert moved.groups[1].opened_ns - recording.groups[1].opened_ns == 1_000_000
    assert moved.clock.realtime_ns(moved.started_ns) == recording.clock.realtime_ns(recording.started_ns)
