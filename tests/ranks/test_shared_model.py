"""SharedModelOptimizer gives the same bits as DistributedDataParallel with the same optimizer on every rank."""

from __future__ import annotations

import copy
import random
import time
from functools import partial

import pytest
import torch
from one_world import OneWorld, name_of
from shared_training import ROUND_BYTES, backward, batch, build, pair, require_close, require_same, train
from torch import nn

import paceline as dist
from paceline.train.shared_model import shared_model_optimizer as one_copy

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
FUSED = ["Adam", "AdamW", "SGD", "Adagrad"]


class Derived(SGD):
    """A subclass whose methods might read a whole parameter."""


def every_optimizer() -> None:
    cases = [(getattr(torch.optim, name), {}) for name in (*ELEMENTWISE, "Adafactor")]
    cases += [(getattr(torch.optim, name), {"fused": True}) for name in FUSED]
    cases += [(AdamW, {"foreach": True}), (dist.Lion, {"weight_decay": 0.1}), (Derived, {"momentum": 0.9})]
    for optimizer_class, options in cases:
        model, shared, reference, optimizer = pair("mlp", optimizer_class, lr=0.01, **options)
        train(model, shared, "mlp", steps=3)
        train(reference, optimizer, "mlp", steps=3)
        try:
            if options.get("fused") and optimizer_class in (torch.optim.Adam, AdamW, SGD):
                require_close(model, reference.module)  # the core updates these, and rounds differently from torch
            else:
                require_same(model, reference.module)
        except AssertionError as error:
            raise AssertionError(f"{optimizer_class.__name__} {options}: {error}") from None


def models(kind: str) -> None:
    model, shared, reference, optimizer = pair(kind, AdamW, lr=0.01)
    train(model, shared, kind)
    train(reference, optimizer, kind)
    require_same(model, reference.module)


def one_round() -> None:
    model, shared, reference, optimizer = pair("mlp", AdamW, round_bytes=4 << 20, lr=0.01)
    train(model, shared, "mlp")
    train(reference, optimizer, "mlp")
    require_same(model, reference.module)


def state_at_any_number_of_ranks() -> None:
    model, shared, reference, optimizer = pair("mlp", AdamW, lr=0.01)
    train(model, shared, "mlp")
    train(reference, optimizer, "mlp")
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        shared.state_dict()
    shared.consolidate_state_dict(to=dist.get_world_size() - 1)
    states = [shared.state_dict() if dist.get_rank() == dist.get_world_size() - 1 else None]
    dist.broadcast_object_list(states, src=dist.get_world_size() - 1)
    (state,) = states
    torch.testing.assert_close(state["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    assert state["param_groups"] == optimizer.state_dict()["param_groups"]
    alone = dist.new_group([0], use_local_synchronization=True) if dist.get_rank() == 0 else None
    if alone is None:
        return
    again = copy.deepcopy(model)  # the copy is not shared
    resumed = dist.SharedModelOptimizer(again, AdamW, lr=1.0, process_group=alone)
    resumed.load_state_dict(state)
    plain = AdamW(model.parameters(), lr=1.0)  # it steps while no other rank reads the parameters
    model.load_state_dict(copy.deepcopy(model).state_dict())
    plain.load_state_dict(state)
    x, target = batch("mlp", 9, 0)
    for each, its_optimizer in ((again, resumed), (model, plain)):
        its_optimizer.zero_grad()
        nn.functional.cross_entropy(each(x), target).backward()
        its_optimizer.step()
    require_same(again, model)


def accumulation() -> None:
    model, shared, reference, optimizer = pair("mlp", AdamW, lr=0.01)
    wrapped = dist.DistributedDataParallel(model)
    shared = dist.SharedModelOptimizer(wrapped, AdamW, lr=0.01)
    for set_to_none in (True, False):
        for each, its_optimizer in ((wrapped, shared), (reference, optimizer)):
            its_optimizer.zero_grad(set_to_none)
            with each.no_sync():
                backward(each, "mlp", 1)
            backward(each, "mlp", 2)
            its_optimizer.step()
    require_same(model, reference.module)


def clipping() -> None:
    norms: list[torch.Tensor] = []
    for norm_type in (2.0, float("inf")):
        model, shared, reference, optimizer = pair("mlp", SGD, lr=0.5)
        clip = partial(nn.utils.clip_grad_norm_, list(reference.parameters()), 0.01, norm_type)
        train(model, shared, "mlp", before=lambda: norms.append(shared.clip_grad_norm_(0.01, norm_type)))  # noqa: B023
        train(reference, optimizer, "mlp", before=lambda: norms.append(clip()))  # noqa: B023
        torch.testing.assert_close(norms[:4], norms[4:], rtol=1e-5, atol=0)
        norms.clear()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def loss_scaling() -> None:
    model, shared, reference, optimizer = pair("mlp", SGD, lr=0.5)
    scales = []
    for each, its_optimizer in ((model, shared), (reference, optimizer)):
        scaler = dist.GradScaler(init_scale=16.0, growth_interval=2)
        for step in range(5):
            each.zero_grad()  # called on the module, not on the optimizer
            x, target = batch("mlp", step, dist.get_rank())
            loss = nn.functional.cross_entropy(each(x), target)
            if step == 2 and dist.get_rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step == 3:
                scaler.unscale_(its_optimizer)
            scaler.step(its_optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def scaler_of_torch() -> None:
    model, shared, _, _ = pair("mlp", SGD, lr=0.5)
    backward(model, "mlp", 0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(TypeError, match=r"use paceline\.GradScaler"):
        scaler.step(shared)


def groups_and_schedulers() -> None:
    model, reference = build(), dist.DistributedDataParallel(build())
    optimizers: list[torch.optim.Optimizer] = []
    for each in (model, reference.module):
        groups = [
            {"params": [p for p in each.parameters() if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for p in each.parameters() if p.dim() == 1], "lr": 0.1},
        ]
        if each is model:
            optimizers.append(dist.SharedModelOptimizer(model, AdamW, params=groups, lr=0.01))
        else:
            optimizers.append(AdamW(groups, lr=0.01))
    model_of = {0: model, 1: reference}
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    for at in (0, 1):
        train(model_of[at], optimizers[at], "mlp", before=lambda: None)
        schedulers[at].step()
        train(model_of[at], optimizers[at], "mlp")
    require_same(model, reference.module)


def later_groups() -> None:
    model, reference = build(), dist.DistributedDataParallel(build())
    optimizers = [
        dist.SharedModelOptimizer(model, AdamW, params=[*model[0].parameters()], lr=0.01),
        AdamW([*reference.module[0].parameters()], lr=0.01),
    ]
    for each, optimizer in zip((model, reference), optimizers, strict=True):
        train(each, optimizer, "mlp", steps=2)
        each.zero_grad()
        plain = each.module if each is reference else each
        optimizer.add_param_group({"params": [*plain[2].parameters(), *plain[4].parameters()], "lr": 0.1})
        train(each, optimizer, "mlp", steps=2)
    require_same(model, reference.module)


def two_optimizers() -> None:
    model, reference = build(), dist.DistributedDataParallel(build())
    sides = []
    for each in (model, reference.module):
        matrices = [p for p in each.parameters() if p.dim() > 1]
        vectors = [p for p in each.parameters() if p.dim() == 1]
        if each is model:
            sides.append([dist.SharedModelOptimizer(model, Derived, params=matrices, lr=0.1)])
            sides[0].append(dist.SharedModelOptimizer(model, AdamW, params=vectors, lr=0.1))
        else:
            sides.append([Derived(matrices, lr=0.1), AdamW(vectors, lr=0.1)])
    for each, optimizers in zip((model, reference), sides, strict=True):
        for step in range(3):
            each.zero_grad()
            backward(each, "mlp", step)
            for optimizer in optimizers:
                optimizer.step()
    require_same(model, reference.module)


class Choosy(nn.Module):
    """Rank 0 skips the second layer, the other ranks skip the third, and all ranks skip the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(8, 40) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + (self.third if dist.get_rank() == 0 else self.second)(x)


def left_out() -> None:
    torch.set_num_threads(1)
    reference = dist.DistributedDataParallel(Choosy(), find_unused_parameters=True)
    model = copy.deepcopy(reference.module)
    for optimizer_class in (AdamW, Derived):
        shared = dist.SharedModelOptimizer(model, optimizer_class, lr=0.1)
        optimizer = optimizer_class(reference.parameters(), lr=0.1)
        train(model, shared, "mlp")
        train(reference, optimizer, "mlp")
        require_same(model, reference.module)


def buffers_come_from_rank_0() -> None:
    model, shared, _, _ = pair("cnn", SGD, lr=0.1)
    train(model, shared, "cnn")
    for buffer in model.buffers():
        everyone = [torch.empty_like(buffer) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, buffer)
        assert all(torch.equal(each, everyone[0]) for each in everyone)


def uneven_inputs() -> None:
    """Each rank has one more batch than the previous rank; a rank without a batch contributes zeros."""
    for by_initial in (True, False):
        model, shared, _, _ = pair("mlp", SGD, lr=0.5)
        reference = copy.deepcopy(model)
        optimizer = SGD(reference.parameters(), lr=0.5)
        size = dist.get_world_size()
        with dist.Join([shared], divide_by_initial_world_size=by_initial):
            for step in range(1 + dist.get_rank()):
                shared.zero_grad()
                backward(model, "mlp", step)
                shared.step()
        for step in range(size):
            optimizer.zero_grad()
            active = range(step, size)
            for rank in active:
                x, target = batch("mlp", step, rank)
                (nn.functional.cross_entropy(reference(x), target) / (size if by_initial else len(active))).backward()
            optimizer.step()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


class Counting(nn.Module):
    """Every element equals the number of steps, since its gradient is -1 and the learning rate is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in (3, 5000, 1, 700))

    def forward(self, pause_s: float) -> torch.Tensor:
        sums = []
        for part in self.parts:
            sums.append(part.sum())
            time.sleep(pause_s)
        return torch.stack(sums).sum()


def nobody_reads_an_update_in_progress() -> None:
    one_copy.LEAST_ROUND_BYTES = ROUND_BYTES
    model = Counting()
    optimizer = dist.SharedModelOptimizer(model, SGD, lr=1.0)
    chance = random.Random(dist.get_rank())
    for step in range(60):
        optimizer.zero_grad()
        loss = model(chance.choice([0.0, 0.0, 0.0005]))
        assert loss.item() == 5704 * step
        (-loss).backward()
        assert all(bool((part == step).all()) for part in model.parts)
        optimizer.step()


PROGRAMS = [
    every_optimizer,
    partial(models, "mlp"),
    partial(models, "cnn"),
    partial(models, "tied"),
    one_round,
    state_at_any_number_of_ranks,
    accumulation,
    clipping,
    loss_scaling,
    scaler_of_torch,
    groups_and_schedulers,
    later_groups,
    two_optimizers,
    left_out,
    buffers_come_from_rank_0,
    uneven_inputs,
    nobody_reads_an_update_in_progress,
]
WORLD = OneWorld(*PROGRAMS)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [name_of(each) for each in PROGRAMS])
def test_it_trains_as_data_parallel_training_does(ranks, name, size):
    WORLD.require(size, name)
