"""The layout of a recording, on which the reader and the core agree."""

from __future__ import annotations

import os

from recorded_programs import CALLS, recorded

from paceline import _core
from paceline.comm.record import layout
from paceline.operate.diagnosis.recording import CallStatus


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
