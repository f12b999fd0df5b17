"""Tests the fake device itself; see `fake_device`."""

from __future__ import annotations

import ctypes
import os
import time

import fake_device
import pytest
import torch
from one_world import Program, name_of, require, run_in_turn
from world import RankFailed, Ranks


def a_network_trains_as_on_the_cpu():
    def trained(device: str) -> tuple[float, list[torch.Tensor]]:
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(144, 8),
            torch.nn.LayerNorm(8),
            torch.nn.Linear(8, 3),
        ).to(device)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, foreach=False)
        images, labels = torch.randn(5, 1, 8, 8).to(device), torch.tensor([0, 1, 2, 1, 0]).to(device)
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(images), labels)
            loss.backward()
            optimizer.step()
        return loss.item(), [parameter.detach().cpu() for parameter in network.parameters()]

    loss, parameters = trained("cpu")
    with torch.fake.delays(seed=1, most_us=300):
        for device in ("fake:0", "fake:1"):
            assert trained(device)[0] == loss
            assert all(map(torch.equal, trained(device)[1], parameters))


def an_operator_refuses_two_devices_and_wrong_shapes():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="fake:0") + torch.ones(2, device="fake:1")
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="fake:0") + torch.ones(2)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.ones(2, 2, device="fake") @ torch.ones(3, 2, device="fake")


def the_host_does_not_wait_for_operators():
    with torch.fake.delays(seed=3, most_us=20_000), torch.fake.counted() as counts:
        x = torch.ones(1000, device="fake:1")
        for _ in range(20):
            x = x.mul(2).add_(-1)
        busy = not torch.accelerator.current_stream("fake:1").query()
    assert busy and counts["synchronizations"] == 0 and counts["waiting_kernels"] == 0
    assert x.sum().item() == 1000


def a_stream_that_nothing_orders_gives_wrong_numbers():
    """A synchronized stream gives correct numbers even in reused memory, because memory is reused in stream order."""

    def wrong(ordered: bool, seed: int) -> bool:
        side = torch.fake.Stream("fake:0")
        with torch.fake.delays(seed, 3000):
            x = torch.zeros(100, device="fake:0")
            x += 1
            if ordered:
                side.wait_stream(torch.fake.current_stream())
            with torch.fake.stream(side):
                y = x + 1
            if ordered:
                torch.fake.current_stream().wait_stream(side)
            return not bool((y == 2).all())

    assert not any(wrong(True, seed) for seed in range(1, 21))
    assert any(wrong(False, seed) for seed in range(1, 21))


def memory_freed_while_another_stream_uses_it_is_overwritten():
    """The memory is not overwritten if the program has called `record_stream`."""

    def wrong(recorded: bool) -> bool:
        side = torch.fake.Stream("fake:0")
        x = torch.ones(100, device="fake:0")
        side.wait_stream(torch.fake.current_stream())
        torch.fake.launch(lambda: time.sleep(0.05), side)
        with torch.fake.stream(side):
            y = x + 1
        if recorded:
            x.record_stream(side)
        del x
        torch.fake.synchronize()
        return not bool((y == 2).all())

    assert wrong(recorded=False)
    assert not wrong(recorded=True)


def events_have_their_place_in_a_stream():
    first, last = (torch.fake.Event(enable_timing=True) for _ in range(2))
    first.record()
    torch.fake.launch(lambda: time.sleep(0.03))
    last.record()
    assert not last.query()
    with torch.fake.counted() as counts:
        last.synchronize()
    assert last.query() and first.query() and first.elapsed_time(last) >= 29
    assert counts["synchronizations"] == 1


def copies_of_pinned_memory_run_behind_the_host():
    host = torch.arange(1000.0).pin_memory()
    assert host.is_pinned() and not torch.arange(3).is_pinned()
    with torch.fake.counted() as counts:
        there = host.to("fake:1", non_blocking=True)
        back = torch.empty(1000, pin_memory=True).copy_(there, non_blocking=True)
    assert counts["synchronizations"] == 0 and counts["copies"] == 2
    torch.accelerator.synchronize("fake:1")
    assert torch.equal(back, host)
    with torch.fake.counted() as counts:
        there.cpu()
        there[0].item()
        torch.arange(3.0).to("fake:1")
    assert counts["synchronizations"] == 3


def a_device_has_numbers_of_its_own():
    torch.manual_seed(5)
    here = torch.rand(3, device="fake:0").cpu()
    host = torch.rand(3)
    state = torch.fake.get_rng_state("fake:0")
    more = torch.nn.functional.dropout(torch.ones(50, device="fake:0")).cpu()
    torch.fake.set_rng_state(state, "fake:0")
    assert torch.equal(torch.nn.functional.dropout(torch.ones(50, device="fake:0")).cpu(), more)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), host)
    assert torch.equal(torch.rand(3, device="fake:0").cpu(), here)
    generator = torch.Generator("fake:1").manual_seed(5)
    assert torch.equal(torch.rand(3, device="fake:1", generator=generator).cpu(), here)


def an_error_behind_the_host_is_raised_later():
    x = torch.zeros(3, device="fake:0")
    x.gather(0, torch.tensor([7], device="fake:0"))  # like a failed assertion on a GPU
    with pytest.raises(RuntimeError, match="behind the host, on stream 0 of fake:0.*out of bounds"):
        torch.fake.synchronize("fake:0")


PROGRAMS: tuple[Program, ...] = (
    a_network_trains_as_on_the_cpu,
    an_operator_refuses_two_devices_and_wrong_shapes,
    the_host_does_not_wait_for_operators,
    a_stream_that_nothing_orders_gives_wrong_numbers,
    memory_freed_while_another_stream_uses_it_is_overwritten,
    events_have_their_place_in_a_stream,
    copies_of_pinned_memory_run_behind_the_host,
    a_device_has_numbers_of_its_own,
    an_error_behind_the_host_is_raised_later,
)


pytestmark = pytest.mark.timeout(400)  # the first one may have to build it


def on_the_device() -> dict[str, str]:
    fake_device.load()
    torch.set_num_threads(1)
    return run_in_turn({name_of(program): program for program in PROGRAMS})


@pytest.fixture(scope="module")
def reports() -> object:
    fake_device.build()
    return Ranks(1)(on_the_device)[0]


@pytest.mark.parametrize("name", [name_of(program) for program in PROGRAMS])
def test_the_device(reports, name):
    require(reports, name)


def _read_by_the_host() -> None:
    fake_device.load()
    ctypes.string_at(torch.ones(3, device="fake").data_ptr(), 4)


def _used_by_a_child() -> str:
    fake_device.load()
    x = torch.ones(3, device="fake")
    receiver, sender = os.pipe()
    if os.fork() == 0:
        try:
            x + 1
        except RuntimeError as error:
            os.write(sender, str(error).splitlines()[0].encode())
        os._exit(0)
    os.wait()
    return os.read(receiver, 1000).decode()


def test_a_host_that_reads_memory_of_the_device_dies(ranks):
    with pytest.raises(RankFailed, match="died with exit code -11"):
        ranks(1)(_read_by_the_host)


def test_a_child_of_a_process_that_used_the_device_is_refused(ranks):
    assert "Cannot re-initialize the fake device in a forked subprocess" in ranks(1)(_used_by_a_child)[0]
