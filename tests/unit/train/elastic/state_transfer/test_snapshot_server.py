"""The log of rounds that a sender's child serves."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from elastic_lessons import result

from paceline.train.elastic.state_transfer.snapshot_server import LogReader, append, new_log
from paceline.train.elastic.state_transfer.transfer_protocol import RoundResult, ViewEntered
from paceline.train.module_tensors import memory_of


@pytest.fixture
def log() -> Iterator[int]:
    descriptor = new_log()
    yield descriptor
    os.close(descriptor)


def test_the_log_gives_what_happened_in_order(log):
    append(log, *result(7, torch.arange(3.0)))
    append(log, ViewEntered(8, 20, ("a",)))
    append(log, *result(8, torch.arange(4.0)))
    reader = LogReader(log)
    found = [reader.next(7, 0), reader.next(8, 0), reader.next(8, 20), reader.next(9, 20)]
    assert [entry.item.round if entry else None for entry in found] == [7, 8, 8, None]
    assert isinstance(found[1].item, ViewEntered)
    assert isinstance(found[2].item, RoundResult)
    assert os.pread(log, 16, found[2].body) == bytes(memory_of(torch.arange(4.0)))
    assert reader.ahead == 2


def test_results_that_the_learner_has_take_no_memory(log):
    for number in range(3):
        append(log, *result(number, torch.ones(1 << 20)))
    reader = LogReader(log)
    assert reader.next(0, 0) is not None
    before = os.fstat(log).st_blocks
    assert reader.forget(2) > 8 << 20
    assert os.fstat(log).st_blocks < 0.5 * before
    assert reader.next(1, 0) is None
    assert reader.next(2, 0) is not None
