"""CUDA tensors that are staged in host memory, on ranks that may share a GPU."""

from __future__ import annotations

import pytest
import staged_programs
import torch
from one_world import merged, name_of, require, run_in_turn
from staged_programs import ON_ANY_DEVICE
from world import Ranks

import paceline as dist
from paceline.comm.engine.staged import channel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU"),
    pytest.mark.timeout(300),
]


def calls_keep_the_order_of_streams() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    first, other = torch.cuda.Stream(), torch.cuda.Stream()
    for number in range(40):
        with torch.cuda.stream(first):
            torch.cuda._sleep(2_000_000 if number % 3 == 0 else 1000)
            tensor = torch.full((100_000,), float(number + rank), device="cuda")
            work = dist.all_reduce(tensor, async_op=True)
        with torch.cuda.stream(other):
            work.wait()
            doubled = tensor * 2
            tensor.record_stream(other)
        del tensor, work
        junk = torch.full((100_000,), -1.0, device="cuda")
        torch.cuda.current_stream().wait_stream(other)
        junk += 1
        assert bool((doubled == 2 * (number * size + size * (size - 1) / 2)).all())


def a_graph_cannot_contain_a_call() -> None:
    tensor = torch.ones(3, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="while a graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()


PROGRAMS = (*ON_ANY_DEVICE, calls_keep_the_order_of_streams, a_graph_cannot_contain_a_call)


def _on_ranks(slot_nbytes: int) -> dict[str, str]:
    torch.cuda.set_device(0)
    staged_programs.HERE = "cuda:0"
    channel.SLOT_BYTES = slot_nbytes
    dist.init_process_group("paceline")
    reports = run_in_turn({name_of(program): program for program in PROGRAMS})
    dist.destroy_process_group()
    return reports


@pytest.fixture(scope="module", params=[4096, 1 << 20])
def reports(request: pytest.FixtureRequest) -> object:
    return merged(Ranks(2)(_on_ranks, request.param, timeout_s=240))


@pytest.mark.parametrize("name", [name_of(program) for program in PROGRAMS])
def test_staged_on_gpus(reports, name):
    require(reports, name)
