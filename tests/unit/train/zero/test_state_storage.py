"""ZeRO with float32 master copies, and with state in a file, compared with one process without ZeRO."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from threads_group import ThreadGroup, ThreadMesh
from torch import nn

import paceline as dist
from paceline.errors import CollectiveMismatchError
from paceline.train.zero.state_storage import FileMemory

STEPS = 3
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.02}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "plain_sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
}


class Net(nn.Module):
    """Parameters of several types and layouts, one of them larger than a rank's share."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)  # threads create models at the same time
        shapes = (60, 40), (6, 4, 3, 5), (7,), (13,)
        wide, image, exact, small = (torch.randn(shape, generator=generator) for shape in shapes)
        self.wide = nn.Parameter(wide.to(dtype))
        self.image = nn.Parameter(image.to(dtype).contiguous(memory_format=torch.channels_last))
        self.exact = nn.Parameter(exact)
        self.small = nn.Parameter(small.to(dtype))


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for each in model.parameters():
        each.grad = torch.randn(each.shape, generator=generator).to(each.dtype)


class Reference:
    """Trains in one process, which updates copies of the parameters and rounds the results."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        optimizer_class, options = OPTIMIZERS[kind]
        self.model = Net(dtype)
        self.masters = [nn.Parameter(each.detach().float()) for each in self.model.parameters()]
        self.optimizer = optimizer_class(self.masters, **options)

    def step(self, change: Callable[[list[torch.Tensor]], None] = lambda gradients: None) -> None:
        for each, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad = None if each.grad is None else each.grad.float()
        change([each.grad for each in self.masters if each.grad is not None])
        self.optimizer.step()
        with torch.no_grad():
            for each, master in zip(self.model.parameters(), self.masters, strict=True):
                each.copy_(master)


def made(model: nn.Module, kind: str, group: ThreadGroup, **arguments: Any) -> dist.ZeroRedundancyOptimizer:
    optimizer_class, options = OPTIMIZERS[kind]
    return dist.ZeroRedundancyOptimizer(
        list(model.parameters()),
        optimizer_class,
        process_group=group,
        master_dtype=torch.float32,
        **arguments,
        **options,
    )


def require_same_parameters(model: nn.Module, reference: Reference) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(mine.detach(), theirs.detach()), name


def require_same_state(state: dict[str, Any], reference: Reference) -> None:
    theirs = reference.optimizer.state_dict()["state"]
    for number, (param, master) in enumerate(zip(reference.model.parameters(), reference.masters, strict=True)):
        mine = dict(state["state"].get(number, {}))
        if param.dtype != torch.float32:
            copy = mine.pop("master")
            assert copy.dtype == torch.float32
            assert torch.equal(copy, master.detach())
        expected = {key: value for key, value in theirs.get(number, {}).items() if value is not None}
        assert {key for key, value in mine.items() if value is not None} == expected.keys()
        for key, value in expected.items():
            assert torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(value)), key


@settings(max_examples=examples(8))
@given(
    st.sampled_from(sorted(OPTIMIZERS)),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_steps_have_the_bits_of_one_process(tmp_path_factory, kind, ranks, stage, in_file, dtype):
    directory = tmp_path_factory.mktemp("state") if in_file else None
    reference = Reference(kind, dtype)
    for step in range(STEPS):
        give_gradients(reference.model, step)
        reference.step()

    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> None:
        model = Net(dtype)
        if world.rank():
            nn.init.zeros_(model.wide)  # all ranks must use rank 0's parameters
        optimizer = made(model, kind, world, stage=stage, offload=directory)
        for step in range(STEPS):
            optimizer.zero_grad()
            give_gradients(model, step)
            optimizer.step()
        require_same_parameters(model, reference)
        optimizer.consolidate_state_dict(to=0)
        if world.rank() == 0:
            require_same_state(optimizer.state_dict(), reference)
        if in_file:
            require_in_file(optimizer)

    ThreadMesh(ranks).run(program)
    if directory is not None:
        assert not [*directory.iterdir()], "the files have no names"


def require_in_file(optimizer: dist.ZeroRedundancyOptimizer) -> None:
    memory = optimizer._storage._file
    assert memory is not None
    for target, state in optimizer.state.items():
        assert target.dtype == torch.float32
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.numel():
                assert memory.holds(value), key


@pytest.mark.parametrize("in_file", [False, True])
def test_a_checkpoint_has_the_copies(tmp_path: Path, in_file: bool) -> None:
    reference = Reference("adamw", torch.bfloat16)
    spill = tmp_path / "spill"
    spill.mkdir()
    offload = spill if in_file else None

    def begin(world: ThreadGroup, groups: list[ThreadGroup]) -> None:
        model = Net(torch.bfloat16)
        optimizer = made(model, "adamw", world, stage=2, offload=offload)
        for step in range(2):
            give_gradients(model, step)
            optimizer.step()
        dist.save({"model": model, "optimizer": optimizer}, tmp_path / "saved", group=world)

    def go_on(world: ThreadGroup, groups: list[ThreadGroup]) -> None:
        model = Net(torch.bfloat16)
        nn.init.zeros_(model.wide)
        optimizer = made(model, "adamw", world, stage=1, offload=offload)
        dist.load({"model": model, "optimizer": optimizer}, tmp_path / "saved", group=world)
        for step in range(2, 4):
            give_gradients(model, step)
            optimizer.step()
        require_same_parameters(model, reference)
        if in_file:
            require_in_file(optimizer)

    for step in range(4):
        give_gradients(reference.model, step)
        reference.step()
    ThreadMesh(3).run(begin)
    ThreadMesh(2).run(go_on)


def test_the_state_of_either_optimizer_is_loaded() -> None:
    reference = Reference("adamw", torch.bfloat16)
    give_gradients(reference.model, 0)
    reference.step()

    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> None:
        model = Net(torch.bfloat16)
        first = made(model, "adamw", world)
        give_gradients(model, 0)
        first.step()
        first.consolidate_state_dict()
        whole = first.state_dict()
        other = Net(torch.bfloat16)
        other.load_state_dict(model.state_dict())
        second = made(other, "adamw", world)
        second.load_state_dict(whole)
        plain_state = {key: {k: v for k, v in each.items() if k != "master"} for key, each in whole["state"].items()}
        without = Net(torch.bfloat16)
        without.load_state_dict(model.state_dict())
        third = made(without, "adamw", world)
        third.load_state_dict({**whole, "state": plain_state})
        for each, optimizer in ((other, second), (without, third)):
            give_gradients(each, 1)
            optimizer.step()
        give_gradients(reference.model, 1)
        reference.step()
        require_same_parameters(other, reference)
        close = zip(without.parameters(), other.parameters(), strict=True)
        assert all(torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02) for a, b in close)

    ThreadMesh(1).run(program)


def test_a_parameter_that_others_write_to_is_taken_over() -> None:
    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> None:
        model, reference = Net(torch.bfloat16), Reference("adamw", torch.bfloat16)
        optimizer = made(model, "adamw", world)
        for step in range(4):
            if step == 2:
                with torch.no_grad():
                    model.wide[:30].fill_(0.25)
                    reference.masters[0][:30].fill_(0.25)
            for each in (model, reference.model):
                give_gradients(each, step)
            optimizer.step()
            reference.step()
        require_same_parameters(model, reference)

    ThreadMesh(2).run(program)


@pytest.mark.parametrize("stage", [1, 2])
def test_clipping_is_that_of_the_copies_gradients(stage: int) -> None:
    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> None:
        model, reference = Net(torch.bfloat16), Reference("adamw", torch.bfloat16)
        optimizer = made(model, "adamw", world, stage=stage)
        norms: list[torch.Tensor] = []
        for step in range(2):
            for each in (model, reference.model):
                give_gradients(each, step)
            norms.append(optimizer.clip_grad_norm_(0.5))
            optimizer.step()
            reference.step(lambda gradients: norms.append(nn.utils.clip_grad_norm_(gradients_of(gradients), 0.5)))
            torch.testing.assert_close(norms[-2], norms[-1])
        for mine, theirs in zip(model.parameters(), reference.model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)  # the norms differ in their last digits

    def gradients_of(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        holders = []
        for each in gradients:
            holder = nn.Parameter(torch.empty_like(each))
            holder.grad = each
            holders.append(holder)
        return holders

    ThreadMesh(2).run(program)


@pytest.mark.parametrize("stage", [1, 2])
def test_float16_is_scaled_and_overflows_are_skipped(stage: int) -> None:
    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> None:
        model, reference = Net(torch.float16), Reference("adamw", torch.float16)
        optimizer, scaler = made(model, "adamw", world, stage=stage), dist.GradScaler(init_scale=4.0)
        scaler.scale(torch.ones(()))
        for step in range(3):
            optimizer.zero_grad()
            for each in (model, reference.model):
                give_gradients(each, step)
            for each in model.parameters():
                each.grad.mul_(scaler.get_scale())
            if step == 1:
                model.wide.grad[-1, -1] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            if step != 1:
                reference.step()
        require_same_parameters(model, reference)
        assert scaler.get_scale() == 2.0

    ThreadMesh(3).run(program)


def test_a_rank_whose_directory_is_missing_tells_the_others(tmp_path: Path) -> None:
    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> None:
        directory = tmp_path / "missing" if world.rank() else tmp_path
        kind = OSError if world.rank() else CollectiveMismatchError
        with pytest.raises(kind, match=r"rank 1: offload: no file can be created in .*missing.*pass a directory"):
            made(Net(torch.bfloat16), "adamw", world, offload=directory)

    ThreadMesh(2).run(program)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    memory = FileMemory(tmp_path, "rank 3")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        OSError, match=r"rank 3: offload: the optimizer needs 17 MB more in .*: No space left .* free some space"
    ):
        memory.zeros(torch.Size([5]), (1,), torch.float32)


def test_arguments_without_a_meaning_are_refused(tmp_path: Path) -> None:
    (group,) = ThreadMesh(1).groups[0]
    model = Net(torch.bfloat16)
    with pytest.raises(ValueError, match="rank 0: offload='cpu' has no meaning for parameters that are on the CPU"):
        made(model, "adamw", group, offload="cpu")
    with pytest.raises(TypeError, match=r"rank 0: master_dtype is torch\.int32; it must be a floating-point type"):
        dist.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, master_dtype=torch.int32)


@settings(max_examples=examples(10))
@given(
    st.lists(
        st.tuples(
            st.permutations(range(3)),
            st.tuples(*[st.integers(0, 12)] * 3),
            st.sampled_from([torch.float32, torch.bfloat16]),
        )
    )
)
def test_tensors_in_a_file_do_not_overlap(tmp_path_factory, wanted):
    memory = FileMemory(tmp_path_factory.mktemp("file"), "rank 0")
    tensors = []
    for order, shape, dtype in wanted:
        like = torch.empty(shape, dtype=dtype, device="meta").permute(order)
        tensors.append(memory.zeros(like.shape, like.contiguous().stride(), dtype))
    assert not any(each.any() for each in tensors)
    for number, each in enumerate(tensors):
        each.fill_(number + 1)
    for number, each in enumerate(tensors):
        assert bool((each == number + 1).all())
        assert memory.holds(each) or each.numel() == 0
    assert not memory.holds(torch.zeros(1))
