"""The fast reader of the latest part of a recording returns the same results as the full reader."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.operate.diagnosis.recording_reader import (
    MOST_CALLS,
    MOST_EVENTS,
    NoRecordingError,
    has_open_waits,
    rank_state_of,
    read_latest,
    read_live,
)

PROGRAM = """
import sys
import paceline
from paceline import _core
from paceline.comm.record import recorder
recorder.begin()
recorder.identify(3, 8)
group = recorder.open_group("mine", "test", 7, 1, [2, 3])
def call(sequence):
    made = _core.RecordedCall(group, 1, 11, 0, sequence, 1000, -1, False, -1)
    made.start()
    return made
first = call(1)
for sequence in range(2, 3000):
    with paceline.span("a"):
        call(sequence).end(0)
if sys.argv[1] == "closed":
    first.end(0)
"""


@pytest.fixture(params=["open", "closed"])
def recording(request, tmp_path):
    """Yields a descriptor of a process's recording; one of its calls may still be open."""
    environment = {**os.environ, "PACELINE_RECORD_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM, request.param], env=environment, check=True, timeout=60)
    (path,) = tmp_path.iterdir()
    fd = os.open(path, os.O_RDONLY)
    yield fd, request.param == "open"
    os.close(fd)


def test_the_latest_calls_and_the_open_ones_are_there(recording):
    fd, is_open = recording
    whole, part = read_live(fd), read_latest(fd)
    assert has_open_waits(fd) == is_open
    assert part.open_calls() == whole.open_calls()
    assert [call for call in part.calls if call.is_over] == list(whole.calls[-MOST_CALLS:])
    assert part.events == whole.events[-MOST_EVENTS:]
    assert (part.groups, part.rank, part.step) == (whole.groups, whole.rank, whole.step)


def test_a_rank_is_told_by_what_it_recorded(recording):
    fd, is_open = recording
    rank = rank_state_of(read_latest(fd), 5)
    (group,) = rank.memberships
    membership = rank.memberships[group]
    assert (rank.rank, membership.number, membership.size, membership.name) == (5, 1, 2, "group mine")
    assert [str(call) for call in rank.calls if call.is_open] == ["all_reduce(float32, 1000) call 1"] * is_open
    assert rank.calls[-1].sequence == 2999


def test_a_file_without_a_recording_has_none(tmp_path):
    with open(tmp_path / "empty", "w+") as file:
        assert not has_open_waits(file.fileno())
        with pytest.raises(NoRecordingError):
            read_latest(file.fileno())
