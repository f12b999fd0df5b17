"""Sharded optimizers and models train on GPUs, staged in host memory and with nccl."""

from __future__ import annotations

import os

import divided_programs
import pytest
import torch
from divided_programs import ON_TWO_DEVICES
from one_world import merged, name_of, require, run_in_turn
from shared_gpu import share_gpu
from world import RankFailed, Ranks

import paceline as dist

GPUS = torch.cuda.device_count()
PROGRAMS = {
    name_of(program): program for program in (*divided_programs.PROGRAMS, *(ON_TWO_DEVICES if GPUS > 1 else ()))
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="there is no GPU"),
    pytest.mark.timeout(300),
]


def on_gpus(backend: str) -> dict[str, str]:
    share_gpu(int(os.environ["RANK"]))
    divided_programs.use("cuda", rtol=1e-3, atol=1e-4)
    torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % GPUS)
    dist.init_process_group(backend)
    return run_in_turn(PROGRAMS)


@pytest.fixture(scope="module", params=["paceline", "cpu:paceline,cuda:nccl"])
def reports(request: pytest.FixtureRequest) -> dict[str, str]:
    try:
        return merged(Ranks(2)(on_gpus, request.param, timeout_s=240))
    except RankFailed as error:
        return dict.fromkeys(PROGRAMS, str(error))


@pytest.mark.parametrize("name", PROGRAMS)
def test_divided_training_on_gpus(reports, name):
    require(reports, name)
