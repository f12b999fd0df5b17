"""SharedModelOptimizer in unusual cases: the result is correct, or an error explains why it cannot be."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from one_world import OneWorld, name_of
from shared_training import backward, build, pair, require_same, train
from torch import nn

import paceline as dist

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


def parameters_may_be_loaded() -> None:
    model, shared, reference, optimizer = pair("mlp", SGD, lr=0.1)
    train(model, shared, "mlp")
    values = {name: torch.full_like(value, 0.01) for name, value in model.state_dict().items()}
    with shared.full_parameters():
        model.load_state_dict(values)
    reference.module.load_state_dict(values)
    require_same(model, reference.module)
    with shared.full_parameters():
        for param in model.parameters():
            param.data += 1.0 + dist.get_rank()  # rank 0's values are used
    for param in reference.module.parameters():
        param.data += 1.0
    train(model, shared, "mlp")
    train(reference, optimizer, "mlp")
    require_same(model, reference.module)


def refused_step(change: Callable[[nn.Module], object]) -> str:
    """Returns the error of a step after rank 1 has changed the module."""
    model, shared, _, _ = pair("mlp", SGD, lr=0.1)
    backward(model, "mlp", 0)
    if dist.get_rank() == 1:
        change(model)
    with pytest.raises(RuntimeError) as caught:
        shared.step()
    shared.zero_grad()
    return str(caught.value)


@torch.no_grad()
def double_first(model: nn.Module) -> None:
    model.get_parameter("0.weight").mul_(2)


@torch.no_grad()
def turn_first(model: nn.Module) -> None:
    """Changes the strides of the parameter, which keeps its memory."""
    weight = model.get_parameter("0.weight")
    weight.data = weight.data.t()


def writing_is_refused() -> None:
    told = refused_step(double_first)
    assert "rank 1 wrote to parameter '0.weight'" in told
    assert "full_parameters()" in told
    assert "rank 1 replaced the memory of parameter '0.weight'" in refused_step(lambda model: model.double())
    assert "rank 1 replaced the memory of parameter '0.weight'" in refused_step(turn_first)


def steps_within_full_parameters_are_refused() -> None:
    model, shared, _, _ = pair("mlp", SGD, lr=0.1)
    with shared.full_parameters():
        backward(model, "mlp", 0)
        with pytest.raises(RuntimeError, match=r"called step\(\) within full_parameters\(\)"):
            shared.step()


def clipping_with_torch_after_scaling_is_refused() -> None:
    model, shared, _, _ = pair("mlp", SGD, lr=0.1)
    backward(model, "mlp", 0)
    shared.clip_grad_norm_(1.0)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="changed after clip_grad_norm_"):
        shared.step()


def clipping_with_torch_is_noticed() -> None:
    model, shared, _, _ = pair("mlp", SGD, lr=0.1)
    for _ in range(2):
        backward(model, "mlp", 0)
        backward(model, "mlp", 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shared.step()
    backward(model, "mlp", 0)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.warns(RuntimeWarning, match=r"this rank's own, .* call optimizer\.clip_grad_norm_"):
        shared.step()


def torchs_scaler_is_refused_after_ours() -> None:
    model, shared, _, _ = pair("mlp", SGD, lr=0.1)
    for scaler in (dist.GradScaler(init_scale=2.0), torch.amp.GradScaler("cpu", init_scale=2.0)):
        shared.zero_grad()
        scaler.scale(model(torch.ones(6, 8)).sum()).backward()
        if type(scaler) is dist.GradScaler:
            scaler.step(shared)
        else:
            with pytest.raises(TypeError, match=r"use paceline\.GradScaler"):
                scaler.step(shared)


def copies_and_files_have_memory_of_their_own() -> None:
    model, shared, _, _ = pair("mlp", SGD, lr=0.1)
    train(model, shared, "mlp")
    twin, file = copy.deepcopy(model), io.BytesIO()
    torch.save(model.get_parameter("0.bias"), file)
    assert len(file.getvalue()) < 3000  # not all of the shared memory
    again = pickle.loads(pickle.dumps(model))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, shared, "mlp", steps=1)
    for each in (twin, again):
        assert all(torch.equal(value, before[name]) for name, value in each.state_dict().items())


class Failing(SGD):
    """Raises an error on rank 1 after updating some parameters."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        if dist.get_rank() == 1:
            raise ZeroDivisionError


def a_torn_update_is_not_the_truth() -> None:
    group = dist.new_group()
    model = build()
    shared = dist.SharedModelOptimizer(model, Failing, process_group=group, lr=0.1)
    backward(model, "mlp", 0)
    if dist.get_rank() == 1:
        with pytest.raises(ZeroDivisionError):
            shared.step()
        group.abort()
    else:
        with pytest.raises(dist.GroupAbortedError):
            shared.step()
    for use in (model.state_dict, lambda: backward(model, "mlp", 0), shared.step):
        with pytest.raises(RuntimeError, match="only partly updated"):
            use()
    group.close()


def refusals() -> None:
    views = nn.Linear(4, 4, bias=False)
    views.other = nn.Parameter(views.weight.detach()[0])
    gaps = nn.Module()
    gaps.weight = nn.Parameter(torch.zeros(4, 8)[:, ::2])
    sparse = nn.Embedding(4, 4, sparse=True)
    for module, told in ((views, "different tensors in the same memory"), (gaps, "gaps"), (sparse, "sparse=False")):
        with pytest.raises(ValueError, match=told):
            dist.SharedModelOptimizer(module, SGD, lr=0.1)
    with pytest.raises(TypeError, match="evaluates the loss several times"):
        dist.SharedModelOptimizer(build(), torch.optim.LBFGS)
    with pytest.raises(dist.CollectiveMismatchError, match="optimizer_class"):
        dist.SharedModelOptimizer(build(), SGD if dist.get_rank() else AdamW, lr=0.1)
    with pytest.raises(RuntimeError, match="leave them out"):
        clip_within_join()


def clip_within_join() -> None:
    model, shared, _, _ = pair("mlp", SGD, lr=0.1)
    with dist.Join([shared]):
        backward(model, "mlp", 0)
        shared.clip_grad_norm_(1.0)


def bytes_of_its_own() -> int:
    """Returns this rank's private memory and its share of the memory that ranks share.

    Other mappings are not counted, because the share of a mapped library depends on the number of processes, including
    those of other tests, that use it at the time. The file is read line by line, because part of the memory
    for the whole text might remain allocated.
    """
    gc.collect()
    trim_memory()
    total, counted = 0, ""
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            name, *values = line.split()
            if not name.endswith(":"):
                counted = "Pss:" if "/memfd:" in line else "Private_Dirty:"
            elif name == counted:
                total += int(values[0]) << 10
    return total


def trim_memory() -> None:
    import ctypes

    ctypes.CDLL(None).malloc_trim(0)


def memory_is_that_of_one_process() -> None:
    """Parameters and state take three times 96 MiB in total, over all ranks."""
    torch.set_num_threads(1)
    x = torch.randn(2, 2048)
    model, optimizer = nn.Linear(2048, 256, bias=False), None
    small = dist.SharedModelOptimizer(model, AdamW, lr=0.1, fused=True)
    model(x).sum().backward()
    small.step()  # the one-time allocations of the first step are included
    small.zero_grad()
    before = bytes_of_its_own()
    model = nn.Linear(2048, 12288, bias=False)
    optimizer = dist.SharedModelOptimizer(model, AdamW, lr=0.1, fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    total = torch.tensor([bytes_of_its_own() - before])
    dist.all_reduce(total)
    assert 0.95 <= total.item() / (3 * 96 << 20) <= 1.1, total


PROGRAMS = [
    parameters_may_be_loaded,
    writing_is_refused,
    steps_within_full_parameters_are_refused,
    clipping_with_torch_after_scaling_is_refused,
    clipping_with_torch_is_noticed,
    torchs_scaler_is_refused_after_ours,
    copies_and_files_have_memory_of_their_own,
    a_torn_update_is_not_the_truth,
    refusals,
]
WORLD = OneWorld(*PROGRAMS)
MEMORY = OneWorld(memory_is_that_of_one_process)


@pytest.mark.parametrize("name", [name_of(each) for each in PROGRAMS])
def test_it_is_right_or_says_why_not(ranks, name):
    WORLD.require(3, name)


def test_memory_of_four_ranks_is_that_of_one_process(ranks):
    MEMORY.require(4, name_of(memory_is_that_of_one_process))
