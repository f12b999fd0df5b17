"""Sharded optimizers and models train on fake devices, whose streams lag behind the host."""

from __future__ import annotations

import divided_programs
import fake_device
import pytest
import torch
from divided_programs import ON_TWO_DEVICES
from one_world import merged, name_of, require, run_in_turn
from world import RankFailed, Ranks

import paceline as dist

PROGRAMS = {name_of(program): program for program in (*divided_programs.PROGRAMS, *ON_TWO_DEVICES)}

pytestmark = pytest.mark.timeout(400)  # the first test may have to build the device


def on_devices() -> dict[str, str]:
    fake_device.load()
    divided_programs.use("fake")
    dist.init_process_group()
    with torch.fake.delays(seed=dist.get_rank(), most_us=50):
        return run_in_turn(PROGRAMS)


@pytest.fixture(scope="module")
def reports() -> dict[str, str]:
    fake_device.build()
    try:
        return merged(Ranks(2)(on_devices))
    except RankFailed as error:  # each test would otherwise wait for the timeout again
        return dict.fromkeys(PROGRAMS, str(error))


@pytest.mark.parametrize("name", PROGRAMS)
def test_divided_training_on_devices(reports, name):
    require(reports, name)
