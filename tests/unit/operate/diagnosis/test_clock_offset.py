"""The clocks of two machines: the true offset is within the stated error, for any delays and drift."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from launching import wait_until

from paceline.operate.diagnosis import recording_reader
from paceline.operate.diagnosis.clock_offset import DRIFT, Offset, OffsetEstimate
from paceline.operate.diagnosis.recording import Clock, Pair, ProcessRecording
from paceline.operate.launch.multinode.membership import Orders
from paceline.operate.launch.multinode.protocol import Start
from paceline.operate.launch.multinode.remote_client import connect_client
from paceline.operate.launch.multinode.server import RendezvousServer

SECOND_NS = 1_000_000_000
DELAY_NS = st.integers(0, SECOND_NS)


@given(
    offset_ns=st.integers(-(10**18), 10**18),
    drift=st.floats(-DRIFT, DRIFT),
    delays=st.lists(st.tuples(DELAY_NS, DELAY_NS, DELAY_NS), min_size=1, max_size=20),
    later_ns=st.integers(0, 600 * SECOND_NS),
)
def test_the_true_offset_lies_within_the_error(offset_ns, drift, delays, later_ns):
    def other_clock(now_ns: int) -> int:
        return offset_ns + now_ns + round(drift * now_ns)

    estimate, now_ns = OffsetEstimate(), 0
    for pause_ns, there_ns, back_ns in delays:
        requested_ns = now_ns + pause_ns
        now_ns = requested_ns + there_ns + back_ns
        estimate.add(requested_ns, other_clock(requested_ns + there_ns), now_ns)
    now_ns += later_ns
    known = estimate.at(now_ns)
    assert known is not None
    assert abs(known.offset_ns - (other_clock(now_ns) - now_ns)) <= known.error_ns + 2  # the rounding error


def test_without_an_answer_nothing_is_known():
    assert OffsetEstimate().at(5) is None


def test_the_answer_with_the_shortest_way_counts():
    estimate = OffsetEstimate()
    estimate.add(0, 1_000_500, 1000)
    estimate.add(2000, 1_002_700, 2010)
    assert estimate.at(2005) == Offset(1_002_700 - 2005, 7, 2005)


class Welcoming:
    """A rendezvous that accepts every node."""

    deadline_s = None

    def reported(self, node: str, report: object, now_s: float) -> Orders:
        return [(node, Start(1, 0, 0, "id", 0, 1, 0, 1, 0, 1, "127.0.0.1", 1))]

    def ended(self, node: str, why: str, now_s: float) -> Orders:
        return []

    def lost(self, node: str, why: str, now_s: float, silent_s: float = 0.0) -> Orders:
        return []

    def tick(self, now_s: float) -> Orders:
        return []


def test_a_launcher_measures_a_clock_that_was_shifted():
    shift_ns = 12_345 * SECOND_NS
    listener = socket.create_server(("127.0.0.1", 0))
    server = RendezvousServer(listener, None, Welcoming(), 5.0)
    client = connect_client(server.address, None, 10.0, 5.0, print)
    try:
        client._wire._clock_ns = lambda: time.monotonic_ns() - shift_ns
        wait_until(client.clock_offset)
        known = client.clock_offset()
        assert abs(known.offset_ns - shift_ns) <= known.error_ns < SECOND_NS
    finally:
        client.close()
        server.close(0.0)


def test_recordings_of_two_hosts_are_put_on_one_clock(tmp_path, monkeypatch):
    shifts = {"first": 0, "second": 5 * SECOND_NS}

    def recorded(directory: Path) -> list[ProcessRecording]:
        at_ns = 7 * SECOND_NS - shifts[directory.name]  # the same point in time, by the host's own clock
        clock = Clock(directory.name, 0, (Pair(0, at_ns, 1), Pair(1000, at_ns + 1000, 1001)))
        rank = sorted(shifts).index(directory.name)
        source = str(directory / "recording.record")
        return [ProcessRecording(source, 1, rank, 2, "", directory.name, True, 0, at_ns, clock, {}, (), ())]

    monkeypatch.setattr(recording_reader, "read_directory", recorded)
    for name, shift_ns in shifts.items():
        facts = {"job": "j", "command": [], "host": name, "workers": 1, "started_s": 1.0, "state": "finished"}
        clock = {"offset_ns": shift_ns, "error_ns": 40 if shift_ns else 0, "at_ns": 5}
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text(json.dumps({**facts, "clock": clock}))
    aligned, error_ns = recording_reader.read_aligned([tmp_path / "second", tmp_path / "first"])
    assert [(each.rank, each.started_ns) for each in aligned] == [(0, 7 * SECOND_NS), (1, 7 * SECOND_NS)]
    assert error_ns == 40
    (tmp_path / "second" / "job.json").unlink()
    by_day, unknown = recording_reader.read_aligned([tmp_path / "first", tmp_path / "second"])
    assert unknown is None and by_day[0].started_ns == by_day[1].started_ns
