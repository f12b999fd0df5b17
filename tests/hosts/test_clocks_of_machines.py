"""Machines with different clocks: the estimated offset is correct within its stated error."""

from __future__ import annotations

import pytest

from hosts.fixture import skip_where_not_permitted
from hosts.machines import Machines
from hosts.network import ipv4
from hosts.shifting import why_not
from paceline.operate.diagnosis.recording_reader import read_aligned
from paceline.operate.diagnosis.runs import read_run

SHIFT_S = 4321
JOB = """
import torch, paceline as dist
dist.init_process_group()
t = torch.ones(4)
for _ in range(50):
    dist.all_reduce(t)
"""


@pytest.fixture
def machines():
    skip_where_not_permitted()
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Machines(2) as made:
        yield made


def test_the_true_offset_of_clocks_lies_within_the_error(machines):
    machines.script.write_text(JOB)
    place = ("--nnodes=2", "--master-addr", ipv4(0), "--master-port=29400", "--rdzv-id=job", "--no-pin")
    directories = [machines.directory / f"h{host}" / "job" for host in range(2)]
    launchers = []
    for host, directory in enumerate(directories):
        flags = ("--log-dir", str(directory.parent), "--node-rank", str(host))
        launchers.append(machines.start(host, *place, *flags, str(machines.script), shift_s=SHIFT_S * host))
    for launcher in launchers:
        machines.expect(launcher, 0, 60)
    clocks = [read_run(directory).clock for directory in directories]
    for host, clock in enumerate(clocks):
        assert abs(clock.offset_ns + host * SHIFT_S * 10**9) <= clock.error_ns < 10**9
    recordings, error_ns = read_aligned(directories)
    assert error_ns == max(clock.error_ns for clock in clocks)
    mine, theirs = [
        {call.sequence: call for call in each.calls if call.operation == "all_reduce"} for each in recordings
    ]
    both = mine.keys() & theirs.keys()
    assert len(both) >= 50
    for sequence in both:  # neither can exit before the other has started
        assert mine[sequence].arrived_ns <= theirs[sequence].ended_ns + error_ns
        assert theirs[sequence].arrived_ns <= mine[sequence].ended_ns + error_ns
