"""DistributedDataParallel on devices: the same results as on the CPU, with few calls and without blocking the host."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fake_collectives
import fake_device
import pytest
import torch
import torch.distributed as torch_dist
from one_world import merged, name_of, require, run_in_turn
from torch import nn
from world import Ranks

import paceline as dist
from paceline.comm.group.process_group import ProcessGroup
from paceline.parallel import hooks

pytestmark = pytest.mark.timeout(400)

STEPS = 4


class Branches(nn.Module):
    """A network with a branch that only rank 1 uses, and one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.sometimes, self.never = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.last(self.sometimes(hidden) if dist.get_rank() == 1 else hidden)


class TwoDevices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.last = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def spread(self) -> TwoDevices:
        self.first.to("fake:0")
        self.last.to("fake:1")
        return self

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x.to(self.first[0].weight.device))
        return [hidden, self.last(hidden.to(self.last[0].weight.device))]


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output.square().mean()
    total = sum(part.square().mean().cpu() for part in output)
    assert isinstance(total, torch.Tensor)
    return total


def inputs_of(step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def trained(
    module: nn.Module, device: str, *, hook: Any = None, accumulates: bool = False, **options: Any
) -> list[torch.Tensor]:
    """Trains on the device, or on the CPU if `device` is ""; returns the parameters as CPU tensors."""
    model = dist.DistributedDataParallel(module.to(device) if device else module, overlap=True, **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        x = inputs_of(step).to(device) if device else inputs_of(step)
        with model.no_sync() if accumulates else contextlib.nullcontext():
            for _ in range(accumulates):
                loss_of(model(x[:2])).backward()
        loss_of(model(x)).backward()
        optimizer.step()
    return [param.detach().cpu() for param in module.parameters()]


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "small buckets": {"bucket_cap_mb": 1e-4},
    "static graph": {"static_graph": True, "bucket_cap_mb": 1e-4},
    "accumulation": {"accumulates": True, "bucket_cap_mb": 1e-4},
    "a hook": {"hook": hooks.bf16_compress_hook, "bucket_cap_mb": 1e-4},
}


def training_gives_the_bits_of_the_cpu(option: str) -> None:
    on_cpu = trained(plain(), "cpu", **OPTIONS[option])
    with torch.fake.delays(seed=3 + dist.get_rank(), most_us=300):
        on_device = trained(plain(), "fake:0", **OPTIONS[option])
    assert all(map(torch.equal, on_cpu, on_device))


def training_on_a_stream_of_its_own_gives_the_bits_of_the_cpu() -> None:
    for options in ({}, {"bucket_cap_mb": 1e-4}):
        on_cpu = trained(plain(), "cpu", **options)
        for seed in range(3):
            side = torch.fake.Stream("fake:0")
            with torch.fake.delays(seed=7 * seed + dist.get_rank(), most_us=500), torch.fake.stream(side):
                assert all(map(torch.equal, on_cpu, trained(plain(), "fake:0", **options)))


def ranks_with_fewer_inputs_give_the_bits_of_the_cpu() -> None:
    results = []
    for device in ("cpu", "fake:0"):
        module = plain()[3:].to(device)
        model = dist.DistributedDataParallel(module, overlap=True, bucket_cap_mb=1e-4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        with model.join():
            for step in range(2 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step)).to(device)
                loss_of(model(x)).backward()
                optimizer.step()
        results.append([param.detach().cpu() for param in module.parameters()])
    assert all(map(torch.equal, *results))


def delayed_gradients_give_those_of_the_cpu() -> None:
    results = []
    for device in ("cpu", "fake:0"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 3)).to(device)
        delayed = [("2.weight", module[2].weight), ("2.bias", module[2].bias)]
        model = dist.DistributedDataParallel(
            module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module[2].weight
        )
        for step in range(2):
            model(torch.tensor([step, dist.get_rank(), 3]).to(device)).square().mean().backward()
        results.append([param.grad.cpu() for param in module.parameters() if param.grad is not None])
    assert len(results[0]) == 5
    for on_cpu, on_device in zip(*results, strict=True):
        torch.testing.assert_close(on_device, on_cpu)


def gradients_of_the_programs_own_are_averaged_where_they_are() -> None:
    module = nn.Linear(4, 2, device="fake:0")
    own = torch.zeros(10, device="fake:0")
    model = dist.DistributedDataParallel(module)
    for _ in range(2):
        own.zero_()
        module.weight.grad, module.bias.grad = own[:8].view(2, 4), own[8:]
        (model(torch.ones(1, 4, device="fake:0") * (1 + dist.get_rank()))).sum().backward()
        assert own.tolist() == [1.5] * 8 + [1.0] * 2
        assert module.bias.grad.data_ptr() == own[8:].data_ptr()
    model.zero_grad()
    loss = model(torch.ones(1, 4, device="fake:0") * (1 + dist.get_rank())).square().sum()
    loss.backward(create_graph=True)
    assert module.weight.grad is not None and module.weight.grad.requires_grad
    mine = module.weight.grad.detach().clone()
    dist.all_reduce(mine, dist.ReduceOp.AVG)
    assert torch.equal(mine, module.weight.grad)


def unused_parameters_give_the_bits_of_the_cpu() -> None:
    results, without = [], []
    for device in ("cpu", "fake:1"):
        torch.manual_seed(0)
        module = Branches()
        results.append(trained(module, device, find_unused_parameters=True))
        without.append([name for name, param in module.named_parameters() if param.grad is None])
    assert all(map(torch.equal, *results))
    assert without[0] == without[1] == ["never.weight", "never.bias"]


def two_devices_of_a_rank_give_the_bits_of_the_cpu() -> None:
    for options in ({}, {"bucket_cap_mb": 1e-4}, {"bucket_cap_mb": 1e-4, "static_graph": True}):
        torch.manual_seed(0)
        module = TwoDevices()
        on_cpu = trained(copy.deepcopy(module), "cpu", **options)
        for seed in range(3):
            with torch.fake.delays(seed=10 * seed + dist.get_rank(), most_us=300):
                assert all(map(torch.equal, on_cpu, trained(copy.deepcopy(module).spread(), "", **options)))


def a_grad_scaler_leaves_out_a_step_on_every_rank() -> None:
    module = plain()[3:].to("fake:0").bfloat16()
    model = dist.DistributedDataParallel(module, device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    scaler = torch.amp.GradScaler("fake", init_scale=2.0**8)
    for step in range(3):
        before = [param.detach().clone() for param in module.parameters()]
        optimizer.zero_grad()
        output = model(torch.ones(2, 8).bfloat16())
        assert output.device == torch.device("fake:0")
        loss = output.float().square().mean() * (float("inf") if step == 1 and dist.get_rank() == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, before, module.parameters())) is (step == 1)
    assert scaler.get_scale() == 2.0**7


def saved_gradients_keep_their_values() -> None:
    model = dist.DistributedDataParallel(plain().to("fake:0"))
    gradients = []
    for step in range(3):
        model.zero_grad()
        loss_of(model(inputs_of(step).to("fake:0"))).backward()
        gradients.append([param.grad for param in model.parameters()])
        gradients.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
    for saved, copied in zip(gradients[::2], gradients[1::2], strict=True):
        assert all(map(torch.equal, saved, copied))


@contextlib.contextmanager
def calls_counted() -> Iterator[Counter[str]]:
    """Counts process-group calls on device tensors."""
    counts: Counter[str] = Counter()
    run = ProcessGroup._run

    def counting(self: ProcessGroup, plan: Any, *args: Any, **known: Any) -> Any:
        if any(not tensor.is_cpu for tensor in plan[1].kept):
            counts[str(plan[0].operation)] += 1
        return run(self, plan, *args, **known)

    ProcessGroup._run = counting  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        ProcessGroup._run = run  # type: ignore[method-assign]


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(300, 300), nn.BatchNorm1d(300), nn.ReLU())]
    return nn.Sequential(*layers).to("fake:0")


def a_step_makes_no_more_calls_and_kernels_than_pytorchs() -> None:
    x = torch.randn(4, 300).to("fake:0")
    ours = dist.DistributedDataParallel(deep(), bucket_cap_mb=1, checks=False)
    theirs = nn.parallel.DistributedDataParallel(deep(), device_ids=[0], bucket_cap_mb=1, gradient_as_bucket_view=True)

    def step(model: nn.Module) -> tuple[dict[str, int], dict[str, int]]:
        model.zero_grad()
        with torch.fake.counted() as forward:
            loss = model(x).square().mean()
        with torch.fake.counted() as backward:
            loss.backward()
        return forward, backward

    for _ in range(3):
        step(ours)
        step(theirs)
    with calls_counted() as calls:
        our_forward, our_backward = step(ours)
    fake_collectives.COLLECTIVES.clear()
    their_forward, their_backward = step(theirs)
    their_calls = dict(fake_collectives.COLLECTIVES)
    told = f"{dict(calls)} {our_forward} {our_backward}; torch's: {their_calls} {their_forward} {their_backward}"
    assert 1 < calls["all_reduce"] <= their_calls["allreduce"], told
    assert calls["broadcast"] == 1, told
    assert our_forward["kernels"] <= their_forward["kernels"], told
    assert our_backward["kernels"] <= their_backward["kernels"], told
    assert our_forward["synchronizations"] == our_backward["synchronizations"] == 0, told


def the_host_waits_for_the_device_in_no_step() -> None:
    model = dist.DistributedDataParallel(deep())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, foreach=False)
    waits = []
    for step in range(14):
        with torch.fake.counted() as counts:
            optimizer.zero_grad()
            model(torch.ones(4, 300, device="fake:0")).square().mean().backward()
            optimizer.step()
        waits.append(counts["synchronizations"])
        if step == 10:  # the replicas' digests were computed in the previous step
            waits.pop()
    assert not any(waits), waits


def a_gradient_that_is_not_finite_is_told_in_a_later_step() -> None:
    module = plain()[3:].to("fake:0")
    model = dist.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    with warnings.catch_warnings(record=True) as caught, torch.fake.counted() as counts:
        warnings.simplefilter("always")
        for step in range(3):
            value = float("nan") if step == 0 and dist.get_rank() == 1 else 1.0
            optimizer.zero_grad()
            model(torch.full((2, 8), value, device="fake:0")).square().mean().backward()
            optimizer.step()
            if step == 0:
                assert not caught and counts.get("synchronizations", 0) == 0
                torch.fake.synchronize()
    told = [str(warning.message) for warning in caught if "own gradients have NaN" in str(warning.message)]
    assert len(told) == (dist.get_rank() == 1), [str(warning.message) for warning in caught]
    for text in told:
        assert "in step 1 this rank's own gradients" in text and "'3.weight' (with NaN among 64 numbers)" in text
        assert "an optimizer has applied their average" in text


def replicas_that_differ_are_told_with_the_name_of_a_parameter() -> None:
    module = plain()[3:].to("fake:1")
    model = dist.DistributedDataParallel(module, checks=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            model.zero_grad()
            model(torch.ones(2, 8, device="fake:1")).square().mean().backward()
            if step == 0 and dist.get_rank() == 1:
                with torch.no_grad():
                    module[2].bias[1] += 1
    told = [str(warning.message) for warning in caught if "differ since step 2" in str(warning.message)]
    assert len(told) == (dist.get_rank() == 0), [str(warning.message) for warning in caught]
    assert all("in 1 of 4 parameters, first in '5.bias'" in text for text in told)
    with pytest.raises(dist.ReplicasDifferError, match=r"first in '5\.bias'"):
        dist.check_replicas(module)


def sync_batch_norm_is_that_of_the_cpu_without_waiting() -> None:
    results = []
    for device in ("cpu", "fake:0"):
        torch.manual_seed(0)
        layer = dist.SyncBatchNorm(4, momentum=None).to(device)
        for step in range(2):
            size = 3 + dist.get_rank() + step
            x = torch.randn(size, 4, 5, generator=torch.Generator().manual_seed(step)).mul_(3).add_(50)
            x = x.to(device).requires_grad_()
            dist.barrier()
            with torch.fake.counted() as counts, calls_counted() as calls:
                output = layer(x)
                output.pow(3).sum().backward()
            assert counts["synchronizations"] == 0
            assert sum(calls.values()) == (0 if device == "cpu" else 2), calls
        assert x.grad is not None and layer.weight.grad is not None
        tensors = [output, x.grad, layer.weight.grad, layer.running_mean, layer.running_var]
        results.append([tensor.detach().cpu() for tensor in tensors])
    for on_cpu, on_device in zip(*results, strict=True):
        torch.testing.assert_close(on_device, on_cpu, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="got 0 value for each channel from all 2 ranks"):
        layer(torch.ones(0, 4, 5, device="fake:0"))


def replicas_of_a_module_run_on_the_streams_of_the_caller() -> None:
    module = plain()[3:]
    x = torch.randn(6, 8)
    wanted = module(x)
    wanted.square().sum().backward()
    gradients = [param.grad.clone() for param in module.parameters() if param.grad is not None]
    for seed in range(5):
        moved = copy.deepcopy(module).to("fake:0")
        moved.zero_grad()
        torch.fake.synchronize(0)
        model = dist.DataParallel(moved)
        assert model.device_ids == [torch.device("fake:0"), torch.device("fake:1")]
        streams = [torch.fake.Stream(device) for device in model.device_ids]
        with torch.fake.delays(seed, most_us=1500), torch.fake.stream(streams[1]), torch.fake.stream(streams[0]):
            output = model(x.to("fake:0", non_blocking=True))
            output.square().sum().backward()
            torch.testing.assert_close(output.detach().cpu(), wanted.detach())
            for param, gradient in zip(moved.parameters(), gradients, strict=True):
                assert param.grad is not None
                torch.testing.assert_close(param.grad.cpu(), gradient)


PROGRAMS = (
    *(partial(training_gives_the_bits_of_the_cpu, option) for option in OPTIONS),
    training_on_a_stream_of_its_own_gives_the_bits_of_the_cpu,
    ranks_with_fewer_inputs_give_the_bits_of_the_cpu,
    delayed_gradients_give_those_of_the_cpu,
    gradients_of_the_programs_own_are_averaged_where_they_are,
    unused_parameters_give_the_bits_of_the_cpu,
    two_devices_of_a_rank_give_the_bits_of_the_cpu,
    a_grad_scaler_leaves_out_a_step_on_every_rank,
    saved_gradients_keep_their_values,
    a_step_makes_no_more_calls_and_kernels_than_pytorchs,
    the_host_waits_for_the_device_in_no_step,
    a_gradient_that_is_not_finite_is_told_in_a_later_step,
    replicas_that_differ_are_told_with_the_name_of_a_parameter,
    sync_batch_norm_is_that_of_the_cpu_without_waiting,
    replicas_of_a_module_run_on_the_streams_of_the_caller,
)


def on_the_devices(folder: Path) -> dict[str, str]:
    fake_collectives.register()
    torch.set_num_threads(1)
    dist.init_process_group("paceline")
    store = torch_dist.FileStore(str(folder / "store"), dist.get_world_size())
    torch_dist.init_process_group("fccl", store=store, rank=dist.get_rank(), world_size=dist.get_world_size())
    return run_in_turn({name_of(program): program for program in PROGRAMS})


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    fake_device.build()
    return merged(Ranks(2)(on_the_devices, tmp_path_factory.mktemp("store"), timeout_s=120))


@pytest.mark.parametrize("name", [name_of(program) for program in PROGRAMS])
def test_training(reports, name):
    require(reports, name)
