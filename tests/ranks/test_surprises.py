"""Rank 0 reports calls of any form if their duration differs from the prediction, once for each kind of call."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from own_recording import mine

import paceline as dist
from paceline.comm.engine.native import engine
from paceline.comm.schedule.cost_model import CostModel, LinkCost

CALLS = 20
SLOW = LinkCost(3600.0, 1e-9)  # no machine is so busy that a message takes an hour


def ways_to_call(group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    tensor = torch.ones(1000)
    prepared, started = (dist.all_reduce_init(tensor, group=group) for _ in range(2))

    def start() -> None:
        started.start()
        started.wait()

    return {
        "synchronous": lambda: dist.all_reduce(tensor, group=group),
        "asynchronous": lambda: dist.all_reduce(tensor, group=group, async_op=True).wait(),
        "prepared": prepared,
        "started": start,
    }


def said_by_groups() -> dict[str, list[str]]:
    """Returns the messages about calls of each form, each in a separate group."""
    engine.UNMEASURED = CostModel(SLOW, SLOW, 1e-9)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger(engine.__name__)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    dist.init_process_group()
    found = {}
    for way in ("synchronous", "asynchronous", "prepared", "started"):
        group = dist.new_group(algorithm="ring")
        make = ways_to_call(group)[way]
        for _ in range(2 * CALLS):
            make()
        dist.destroy_process_group(group)
        found[way] = list(said)
        said.clear()
    predicted = [
        call.predicted_s for call in mine().calls if call.algorithm == "ring" and call.operation == "all_reduce"
    ]
    assert len(predicted) == 8 * CALLS and all(each == predicted[0] and each > 3600 for each in predicted)
    dist.destroy_process_group()
    return found


def test_calls_of_all_forms_that_are_far_off_are_told_once(ranks):
    first, second = ranks(2)(said_by_groups)
    for way, said in first.items():
        (text,) = said
        assert "all_reduce of 1,000 float32 by ring took" in text, way
        assert f"in {CALLS} calls, but was predicted to take" in text, way
    assert not any(second.values())
