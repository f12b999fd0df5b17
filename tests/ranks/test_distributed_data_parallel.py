"""DistributedDataParallel, compared with torch's and on its own."""

from __future__ import annotations

import copy
import os
import pickle
import signal

import pytest
import torch
from one_world import OneWorld
from torch import nn
from training import average_gradients, batches, gradients, mlp, require_equal_on_all_ranks, require_gradients

import paceline as dist


class Unused(nn.Module):
    """Each rank skips a different layer, and one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        left_out = int(x[0, 0] > 0)
        for index, layer in enumerate(self.layers[:3]):
            if index != left_out:
                x = torch.relu(layer(x))
        return {"logits": [self.head(x)]}


def build(kind: str) -> nn.Module:
    if kind == "mlp":
        return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    if kind == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3),
            nn.Flatten(),
            nn.Linear(144, 3),
        ).to(memory_format=torch.channels_last)
    return Unused()


def batch(kind: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    target = torch.randint(0, 3, (6,), generator=generator)
    shape = (6, 1, 8, 8) if kind == "cnn" else (6, 8)
    return torch.randn(shape, generator=generator), target


def loss_of(output: object, target: torch.Tensor) -> torch.Tensor:
    logits = output["logits"][0] if isinstance(output, dict) else output
    return nn.functional.cross_entropy(logits, target)


def like_torch(file: str) -> None:
    import torch.distributed as gloo

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    gloo.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    for kind in ("cnn", "unused"):
        torch.manual_seed(rank)  # different on each rank: wrapping must make them the same
        options = {"find_unused_parameters": kind == "unused"}
        early = dist.DistributedDataParallel(build(kind), bucket_cap_mb=0.001, overlap=True, **options)
        late = dist.DistributedDataParallel(copy.deepcopy(early.module), overlap=False, **options)
        reference = nn.parallel.DistributedDataParallel(copy.deepcopy(early.module), **options)
        models = [(model, torch.optim.SGD(model.parameters(), 0.1)) for model in (early, late, reference)]
        generator = torch.Generator().manual_seed(rank)
        for _ in range(20):
            x, target = batch(kind, generator)
            for model, optimizer in models:
                optimizer.zero_grad()
                loss_of(model(x), target).backward()
                optimizer.step()
        for mine, also_mine, other in zip(early.parameters(), late.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6, msg=lambda m, k=kind: f"{k}: {m}")
            assert torch.equal(mine, also_mine)
        assert list(early.state_dict()) == list(reference.state_dict())
        require_equal_on_all_ranks(early.parameters())
    gloo.destroy_process_group()


@pytest.mark.parametrize("size", [1, 3, 4])
def test_twenty_steps_end_where_torchs_do(ranks, size, tmp_path):
    ranks(size)(like_torch, str(tmp_path / "gloo"))


def accumulate_without_sync() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = build("mlp")
    wrapped = dist.DistributedDataParallel(copy.deepcopy(model))
    data = [
        batch("mlp", torch.Generator().manual_seed(10 * r + step))
        for r in range(dist.get_world_size())
        for step in range(3)
    ]
    for step in range(3):
        x, target = data[3 * rank + step]
        if step < 2:
            with wrapped.no_sync():
                loss_of(wrapped(x), target).backward()
        else:
            loss_of(wrapped(x), target).backward()
    for x, target in data:
        (loss_of(model(x), target) / dist.get_world_size()).backward()
    for mine, other in zip(wrapped.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-6)
    require_equal_on_all_ranks(gradients(wrapped))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_sync_accumulates_and_the_next_backward_reduces_all(ranks, size):
    ranks(size)(accumulate_without_sync)


def leave_parameters_out() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Unused()
    reference = copy.deepcopy(model)
    wrapped = dist.DistributedDataParallel(model, find_unused_parameters=True)
    target = torch.tensor([0, 1])
    inputs = [torch.full((2, 8), 1.0), torch.full((2, 8), -1.0)]  # rank 0 skips layer 1, and rank 1 skips layer 0
    loss_of(wrapped(inputs[rank]), target).backward()
    assert model.layers[3].weight.grad is None  # used by no rank
    for x in inputs:
        (loss_of(reference(x), target) / 2).backward()
    for mine, other in zip(gradients(model), gradients(reference), strict=True):
        torch.testing.assert_close(mine, other)

    wrapped.zero_grad(set_to_none=False)
    model.layers[3].weight.grad = torch.full((8, 8), 5.0)
    loss_of(wrapped(inputs[rank]), target).backward()
    assert (model.layers[3].weight.grad == 5).all()  # the gradient of the unused layer is not changed
    require_equal_on_all_ranks(gradients(model))


def test_a_parameter_is_averaged_if_any_rank_used_it(ranks):
    ranks(2)(leave_parameters_out)


def unused_by_mistake() -> None:
    dist.init_process_group()
    always = dist.DistributedDataParallel(Unused())
    target = torch.tensor([0, 1])
    with pytest.raises(
        RuntimeError,
        match=r"rank \d: this backward produced no gradient for 4 of 10 .*layers\.1\.weight.*find_unused_p",
    ):
        loss_of(always(torch.full((2, 8), 1.0)), target).backward()

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.skip_b = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) if self.skip_b else self.b(self.a(x))

    for overlap in (False, True):
        sometimes = dist.DistributedDataParallel(Sometimes(), bucket_cap_mb=1e-5, overlap=overlap)
        sometimes(torch.ones(1, 2)).sum().backward()
        sometimes.zero_grad()
        sometimes.module.skip_b = True
        sometimes(torch.ones(1, 2)).sum().backward()
        sometimes.zero_grad()  # the message names only parameters that had no gradient when the backward pass ended
        with pytest.raises(
            RuntimeError, match=r"rank \d: the last backward produced no gradient for 2 of 4 .*b\.weight, b\.bias"
        ):
            sometimes(torch.ones(1, 2))


def test_a_parameter_without_a_gradient_is_named(ranks):
    ranks(2)(unused_by_mistake)


def require_refusal(module: nn.Module, text: str, kind: type[Exception] = RuntimeError, **options: object) -> None:
    with pytest.raises(kind, match=text):
        dist.DistributedDataParallel(module, **options)


def shapes_that_differ() -> None:
    text = r"ranks 0, 2: parameter 'weight' of shape \[3, 2\].*; rank 1: .*\[4, 2\]"
    require_refusal(nn.Linear(2, 3 + (dist.get_rank() == 1)), text)


def a_parameter_that_one_rank_lacks() -> None:
    text = r"ranks 0, 2: parameter 'bias'.*rank 1: nothing in its place"
    require_refusal(nn.Linear(2, 2, bias=dist.get_rank() != 1), text)


def types_that_differ() -> None:
    dtype = torch.float64 if dist.get_rank() == 1 else None
    require_refusal(nn.Linear(2, 2, dtype=dtype), r"rank 1: parameter 'weight'.*float64")


def nothing_to_train_on_one_rank() -> None:
    module = nn.Linear(2, 2).requires_grad_(dist.get_rank() != 1)
    require_refusal(module, r"rank 1 could not wrap.*no parameter|^no parameter")


def options_that_differ() -> None:
    text = r"ranks 0, 2: static_graph=False; rank 1: static_graph=True"
    require_refusal(nn.Linear(2, 2), text, dist.CollectiveMismatchError, static_graph=dist.get_rank() == 1)


def a_parameter_without_a_shape() -> None:
    require_refusal(nn.LazyLinear(2), "'weight' has no shape yet; call the module once, then wrap it", ValueError)


def a_parameter_on_the_meta_device() -> None:
    text = r"'weight' is on meta, .* 'paceline' has no engine for it: module.to_empty"
    require_refusal(nn.Linear(2, 2, device="meta"), text, ValueError)


def a_bucket_of_negative_size() -> None:
    require_refusal(nn.Linear(2, 2), "bucket_cap_mb is -1", ValueError, bucket_cap_mb=-1)


# Each program also shows that the group is still usable after the errors of the previous programs.
REFUSALS = OneWorld(
    shapes_that_differ,
    a_parameter_that_one_rank_lacks,
    types_that_differ,
    nothing_to_train_on_one_rank,
    options_that_differ,
    a_parameter_without_a_shape,
    a_parameter_on_the_meta_device,
    a_bucket_of_negative_size,
)


@pytest.mark.parametrize("case", REFUSALS.programs)
def test_what_cannot_be_wrapped_is_refused_on_every_rank(case):
    REFUSALS.require(3, case)


def test_torchs_old_name_for_cpus_is_the_same_class():
    assert dist.DistributedDataParallelCPU is dist.DistributedDataParallel


def absent_gpus() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    no_gpu = rf"rank {rank}: %s contains cuda:%d .*this process sees no GPU.*leave device_ids and output_device out"
    for arguments, told in (
        ({"device_ids": [rank]}, no_gpu % ("device_ids", rank)),
        ({"device_ids": ["cuda"], "output_device": "cuda"}, no_gpu % ("device_ids", 0)),
        ({"output_device": rank + 1}, no_gpu % ("output_device", rank + 1)),
        ({"device_ids": [0], "output_device": 0}, no_gpu % ("device_ids", 0)),
    ):
        with pytest.raises(ValueError, match=told):
            dist.DistributedDataParallel(nn.Linear(2, 2), **arguments)
    for device_ids in (None, []):  # torch ignores the index 0 then
        model = dist.DistributedDataParallel(nn.Linear(2, 2), device_ids=device_ids, output_device=0)
        assert model(torch.ones(1, 2)).is_cpu
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        with pytest.raises(ValueError, match=r"'weight' is on cpu, .* cuda:1: module\.to\('cuda:1'\), or"):
            dist.DistributedDataParallel(nn.Linear(2, 2), device_ids=[1])
        with pytest.raises(ValueError, match=r"device_ids contains cuda:2, and .* 2 GPUs: the numbers from 0 to 1"):
            dist.DistributedDataParallel(nn.Linear(2, 2), device_ids=[2])
    dist.barrier()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpus_that_are_not_there_are_told(ranks):
    ranks(2)(absent_gpus)


def change_after_wrapping() -> None:
    dist.init_process_group()

    def wrapped() -> dist.DistributedDataParallel:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[0].bias.requires_grad_(False)
        return dist.DistributedDataParallel(module)

    x = torch.ones(1, 2)
    added, replaced, unfrozen, frozen = wrapped(), wrapped(), wrapped(), wrapped()
    added.module.extra = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="changed after wrapping"):
        added(x)
    replaced.module[1].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="changed after wrapping"):
        replaced(x)
    evaluated = wrapped()
    values = {name: torch.zeros_like(param) for name, param in evaluated.named_parameters()}
    for _ in range(17):
        assert torch.func.functional_call(evaluated, values, x).count_nonzero() == 0
    evaluated(x).sum().backward()
    called = wrapped()  # the first forward pass, which checks the module
    doubled = {"module.1.weight": called.module[1].weight * 2}
    torch.func.functional_call(called, doubled, x).sum().backward()
    expected = 2 * called.module[0](x).detach().expand(2, 2)
    torch.testing.assert_close(called.module[1].weight.grad, expected)
    for _ in range(3):
        unfrozen(x).sum().backward()
    unfrozen.module[0].bias.requires_grad_()

    def train_on() -> None:
        for _ in range(20):
            unfrozen(x).sum().backward()

    with pytest.raises(RuntimeError, match=r"'0\.bias' did not require a gradient when"):
        train_on()
    frozen.module[1].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"1\.weight, which were frozen after the module was wrapped"):
        frozen(x).sum().backward()


def test_a_module_changed_after_wrapping_is_refused(ranks):
    ranks(1)(change_after_wrapping)


def convert_after_wrapping() -> None:
    dist.init_process_group()
    options = ({}, {"overlap": True, "bucket_cap_mb": 0}, {"static_graph": True}, {"find_unused_parameters": True})
    for option in options:
        for dtype, is_wrapper in ((torch.float64, True), (torch.bfloat16, True), (torch.float64, False)):
            model = dist.DistributedDataParallel(mlp(), **option)
            kind = torch.float32
            for step in range(4):
                if step == 2:
                    kind = dtype
                    (model if is_wrapper else model.module).to(kind)
                model.zero_grad()
                inputs = [rank_inputs.to(kind) for rank_inputs in batches(4, 8, step=step)]
                expected = average_gradients(model.module, lambda m, x=inputs: (m(part).sum() for part in x))
                model(inputs[dist.get_rank()]).sum().backward()
                require_gradients(model.module, expected, 0.02 if kind is torch.bfloat16 else 1e-5)
                require_equal_on_all_ranks(gradients(model))


def test_a_module_converted_after_wrapping_trains_on(ranks):
    ranks(2)(convert_after_wrapping)


def change_buffers() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    norm = module[1]
    norm.momentum = 0.0
    wrapped = dist.DistributedDataParallel(module)
    norm.running_mean.fill_(float(rank))
    wrapped(torch.randn(3, 4)).sum().backward()
    assert (norm.running_mean == 0).all()
    norm.running_mean = torch.full((4,), float(rank))  # another tensor
    wrapped(torch.randn(3, 4)).sum().backward()
    assert (norm.running_mean == 0).all()

    norm.running_mean.fill_(float(rank))
    if rank == 0:  # the call does not wait for other ranks
        with torch.no_grad():
            wrapped(torch.randn(3, 4))
        wrapped.eval()
        wrapped(torch.randn(3, 4))
        wrapped.train()
        with wrapped.no_sync():
            wrapped(torch.randn(3, 4))
    assert (norm.running_mean == rank).all()
    del wrapped
    own = dist.DistributedDataParallel(module, broadcast_buffers=False)
    norm.running_mean.fill_(float(rank))
    own(torch.randn(3, 4)).sum().backward()
    assert (norm.running_mean == rank).all()


def test_buffers_follow_rank_0_in_training_only(ranks):
    ranks(2)(change_buffers)


def buffers_that_become_other_views() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    module = nn.Linear(4, 1)
    module.store = torch.zeros(8)
    module.register_buffer("seen", module.store[:1])
    wrapped = dist.DistributedDataParallel(module)
    for length in (1, 3, 5):  # all begin at the same address
        module.seen = module.store[:length]
        module.store.copy_(torch.arange(8.0) + 10 * length + rank)
        wrapped(torch.ones(2, 4)).sum().backward()
        assert module.seen.tolist() == [10.0 * length + at for at in range(length)]
        assert module.store[length:].tolist() == [10.0 * length + at + rank for at in range(length, 8)]
    changes = (  # to memory that a stale view would miss, or would see in a different order
        (lambda seen: setattr(seen, "data", module.store), [*range(8)]),
        (lambda seen: setattr(seen, "data", module.store[::2]), [0, 2, 4, 6]),
        (lambda seen: setattr(seen, "data", module.store.view(2, 4)), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (lambda seen: setattr(seen, "data", module.store.view(2, 4).t()), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (lambda seen: setattr(seen, "data", torch._neg_view(module.store)), [-float(at) for at in range(8)]),
        (lambda seen: seen.resize_(2), [0, -1]),
    )
    for change, expected in changes:
        module.store.copy_(torch.arange(8.0) + 100 * rank)
        with torch.no_grad():
            change(module.seen)
        wrapped(torch.ones(2, 4)).sum().backward()
        assert module.seen.tolist() == expected


def test_a_buffer_that_becomes_another_view_is_sent_as_it_is(ranks):
    ranks(2)(buffers_that_become_other_views)


def parameters_that_become_parts_of_themselves() -> None:
    dist.init_process_group()
    module = nn.Linear(4, 6)
    wrapped = dist.DistributedDataParallel(module)
    module.bias.data = module.bias.data[:1]
    with pytest.raises(
        ValueError, match=r"'bias' has the shape \[1\]; when .* wrapped, the parameter had the shape \[6\]"
    ):
        wrapped(torch.ones(2, 4)).sum().backward()


def test_a_gradient_of_another_shape_is_refused(ranks):
    ranks(2)(parameters_that_become_parts_of_themselves)


def copy_pickle_and_replace() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    wrapped = dist.DistributedDataParallel(build("mlp"), find_unused_parameters=True)
    assert wrapped.communication_wait_s() == 0
    assert {f"module.{name}" for name in wrapped.module.state_dict()} == set(wrapped.state_dict())
    for model in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)), wrapped):
        model(torch.randn(2, 8) + rank).sum().backward()
        require_equal_on_all_ranks(gradients(model))
    assert wrapped.communication_wait_s() > 0
    module = wrapped.module
    del wrapped, model
    again = dist.DistributedDataParallel(module, bucket_cap_mb=1e-5, overlap=True)
    again.zero_grad()
    again(torch.randn(2, 8) + rank).sum().backward()
    require_equal_on_all_ranks(gradients(again))
    hooks = [len(param._post_accumulate_grad_hooks) for param in module.parameters()]
    assert hooks == [1] * 6  # no hooks of the first wrapper remain


def test_wrappers_are_copied_pickled_and_replaced(ranks):
    ranks(2)(copy_pickle_and_replace)


def train_until_killed(where: str) -> str:
    dist.init_process_group()
    wrapped = dist.DistributedDataParallel(build("mlp"), bucket_cap_mb=0.001, overlap=True)
    step = 0

    def die(_: torch.Tensor) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1 and where == "in":
        wrapped.module[2].weight.register_post_accumulate_grad_hook(die)  # some buckets have been sent, others have not
    for step in range(1000):
        loss = loss_of(wrapped(torch.randn(6, 8)), torch.zeros(6, dtype=torch.int64))
        if dist.get_rank() == 1 and where == "before":
            die(loss)
        try:
            loss.backward()
        except dist.PeerLostError as error:
            return f"{error.rank} {error}"
    return "never"


@pytest.mark.parametrize("where", ["before", "in"])
def test_a_killed_rank_ends_the_backward_of_the_others(ranks, where):
    with ranks(3).start(train_until_killed, where) as world:
        told = world.join(20, expect_dead=frozenset({1}))
    assert told[0].startswith("1 rank 1 (") and "died" in told[0]
    assert told[2].startswith("1 rank 1 (")
