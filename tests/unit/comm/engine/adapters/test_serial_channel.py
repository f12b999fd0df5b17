"""Waits in an engine that runs one call at a time."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest
import torch
from schedule_wires import COUNT, HOSTS, Link, Links, Wire, pieces

from paceline.comm.engine.adapters.schedule_executor import PythonExecutor
from paceline.comm.engine.adapters.serial_channel import CallTimeout
from paceline.comm.engine.channel import DTYPE_CODES, CollectiveCall, ReduceOp
from paceline.comm.schedule.steps import Operation


def test_the_wait_for_an_absent_rank_ends_at_its_time_out():
    links: Links = defaultdict(Link)
    tensor = torch.ones(COUNT)
    call = CollectiveCall(
        Operation.ALL_REDUCE, DTYPE_CODES[torch.float32], ReduceOp.SUM, -1, COUNT, 0, [], [pieces(tensor)]
    )
    with pytest.raises(CallTimeout):
        PythonExecutor(Wire(links, 0), 0, HOSTS[2]).run(call, time.monotonic_ns() + 50_000_000)
