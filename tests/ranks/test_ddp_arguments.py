"""Arguments of DistributedDataParallel and combinations with other features; training must be correct with each."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import average_gradients, batches, gradients, mlp, require_equal_on_all_ranks, require_gradients

import paceline as dist

TINY_BUCKETS = {"bucket_cap_mb": 0.0003, "overlap": True}


def several_devices() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    for options in ({}, TINY_BUCKETS, {"find_unused_parameters": True}, {"output_device": "cpu"}):
        for devices in (["cpu"], ["cpu"] * 3, ["cpu"] * 9):
            module = nn.Sequential(*mlp(), nn.BatchNorm1d(8).eval())
            expected = average_gradients(module, lambda m: [m(x).square().mean() for x in batches(5, 8)])
            wrapped = dist.DistributedDataParallel(module, device_ids=devices, **options)
            wrapped.train(False)
            output = wrapped(batches(5, 8)[rank])
            assert output.shape == (5, 8)
            output.square().mean().backward()
            require_gradients(module, expected)
    split_otherwise = dist.DistributedDataParallel(nn.Linear(4, 4), device_ids=["cpu"] * 2, dim=1)
    assert split_otherwise(torch.ones(3, 6, 4)).shape == (3, 6, 4)


def test_a_process_may_have_several_devices(ranks):
    ranks(2)(several_devices)


class OverDevices(nn.Module):
    """A module whose halves specify their devices, as in models that are too large for one device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8).to("cpu"), nn.Linear(8, 2).to("cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.to("cpu")).to("cpu"))


def over_devices() -> None:
    dist.init_process_group()
    module = OverDevices()
    expected = average_gradients(module, lambda m: [m(x).sum() for x in batches(4, 8)])
    wrapped = dist.DistributedDataParallel(module, device_ids=None, check_reduction=True, gradient_as_bucket_view=True)
    wrapped(batches(4, 8)[dist.get_rank()]).sum().backward()
    require_gradients(module, expected)


def test_a_module_may_place_its_layers_itself(ranks):
    ranks(2)(over_devices)


def ignore_parameters_and_buffers() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4 + rank))  # the last layer differs
    names = ["2.weight", "2.bias", "1.running_mean"]
    dist.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    nn.init.constant_(module[2].weight, float(rank))
    module[1].running_mean.fill_(float(rank))
    wrapped = dist.DistributedDataParallel(module)
    assert (module[2].weight == rank).all() and (module[1].running_mean == rank).all()
    module[1].momentum = 0.0
    module[1].running_var.fill_(rank + 1.0)
    wrapped(batches(3, 4)[rank]).sum().backward()
    assert (module[1].running_mean == rank).all() and (module[1].running_var == 1).all()
    require_equal_on_all_ranks(gradients(module[0]))
    assert module[2].weight.grad.shape == (4 + rank, 4)
    with pytest.raises(ValueError, match=r"no parameter or buffer 'layer', '3\.bias'; names are those of"):
        dist.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["layer", "3.bias"])


def test_ignored_parameters_and_buffers_are_left_alone(ranks):
    ranks(2)(ignore_parameters_and_buffers)


def shared_storage() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    module = mlp()
    module[2].weight = nn.Parameter(module[0].weight.data.view(8, 8))  # another parameter that shares the memory
    expected = average_gradients(module, lambda m: [m(x).square().sum() for x in batches(4, 8)])
    for options in ({}, TINY_BUCKETS):
        module.zero_grad()
        wrapped = dist.DistributedDataParallel(module, **options)
        wrapped(batches(4, 8)[rank]).square().sum().backward()
        require_gradients(module, expected)
    assert module[0].weight.data_ptr() == module[2].weight.data_ptr()


def test_parameters_may_share_their_memory(ranks):
    ranks(2)(shared_storage)


class Words(nn.Module):
    def __init__(self, bag: bool, used: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.words, self.unused, self.head = kind(20, 4, sparse=True), nn.Embedding(3, 4, sparse=True), nn.Linear(4, 2)
        self.head.weight.requires_grad_(used)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x)
        return self.head(y if y.dim() == 2 else y.mean(1))


def train_with_sparse_gradients() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    every = [torch.randint(0, 10 + r, (3 + r, 5), generator=torch.Generator().manual_seed(r)) for r in range(3)]
    for bag in (False, True):
        for options in (
            {"find_unused_parameters": True},
            {"static_graph": True},
            {"static_graph": True, **TINY_BUCKETS},
        ):
            module = Words(bag)
            reference = copy.deepcopy(module)
            wrapped = dist.DistributedDataParallel(module, **options)
            optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
            for _ in range(3):
                reference.zero_grad()
                sum(reference(x).square().mean() / 3 for x in every).backward()
                optimizer.zero_grad()
                wrapped(every[rank]).square().mean().backward()
                gradient = module.words.weight.grad
                assert gradient.is_sparse and gradient._nnz() < 15
                torch.testing.assert_close(gradient.to_dense(), reference.words.weight.grad.to_dense())
                torch.testing.assert_close(module.head.weight.grad, reference.head.weight.grad)
                optimizer.step()
                reference.load_state_dict(module.state_dict())
            assert module.unused.weight.grad is None
            require_equal_on_all_ranks(module.parameters())


def test_sparse_gradients_are_averaged_and_stay_sparse(ranks):
    ranks(3)(train_with_sparse_gradients)


def only_on_one_rank() -> None:
    dist.init_process_group()
    module = nn.ModuleList([nn.Embedding(4, 2, sparse=True), nn.Embedding(4, 2, sparse=True)])
    nn.init.ones_(module[0].weight)

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = module

        def forward(self, which: int) -> torch.Tensor:
            return self.tables[which](torch.tensor([1, 2]))

    wrapped = dist.DistributedDataParallel(Chooses(), find_unused_parameters=True)
    wrapped(dist.get_rank()).sum().backward()
    for table in module:
        assert table.weight.grad.is_sparse
        assert table.weight.grad.to_dense().tolist() == [[0, 0], [0.5, 0.5], [0.5, 0.5], [0, 0]]


def test_a_sparse_gradient_that_only_one_rank_has_reaches_all(ranks):
    ranks(2)(only_on_one_rank)


def double_backward() -> None:
    dist.init_process_group()
    rank = dist.get_rank()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + slope.square().sum()

    for options in ({}, TINY_BUCKETS):
        module = mlp()
        expected = average_gradients(module, lambda m: [loss(m, x) for x in batches(4, 8)])
        wrapped = dist.DistributedDataParallel(module, **options)
        for _ in range(3):
            module.zero_grad()
            loss(wrapped, batches(4, 8)[rank]).backward()
            require_gradients(module, expected)


def test_a_gradient_penalty_is_averaged(ranks):
    ranks(2)(double_backward)


class Halves(nn.Module):
    """Two halves that are checkpointed, reentrantly or not."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = mlp(2), mlp(2)
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = checkpoint(self.first, x, use_reentrant=self._reentrant)
        return {"y": checkpoint(self.second, y, use_reentrant=self._reentrant)}


def compile_before_and_after() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    wrap = dist.DistributedDataParallel
    for backend in ("eager", "aot_eager"):
        for make in (
            lambda m, b=backend: wrap(torch.compile(m, backend=b)),
            lambda m, b=backend: torch.compile(wrap(m), backend=b),
            lambda m, b=backend: torch.compile(wrap(m, **TINY_BUCKETS), backend=b),
        ):
            module = mlp()
            expected = average_gradients(module, lambda m: [m(x).square().sum() for x in batches(4, 8)])
            model = make(module)
            for _ in range(2):
                module.zero_grad()
                model(batches(4, 8)[rank]).square().sum().backward()
                require_gradients(module, expected)


def test_torch_compile_before_and_after_wrapping(ranks):
    ranks(2)(compile_before_and_after, timeout_s=110)


def mixed_precision() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    module = mlp()
    expected = average_gradients(module, lambda m: [m(x).square().mean() for x in batches(4, 8)])
    wrapped = dist.DistributedDataParallel(module, **TINY_BUCKETS)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    with torch.autocast("cpu", torch.bfloat16):
        loss = wrapped(batches(4, 8)[rank]).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    require_gradients(module, expected, tolerance=0.03)
    norm = nn.utils.clip_grad_norm_(wrapped.parameters(), 0.01)
    assert norm > 0.01
    torch.testing.assert_close(nn.utils.get_total_norm(gradients(module)), torch.tensor(0.01))
    scaler.step(optimizer)
    scaler.update()
    require_equal_on_all_ranks(wrapped.parameters())

    before = [param.detach().clone() for param in wrapped.parameters()]
    optimizer.zero_grad()
    overflows = float("inf") if rank == 1 else 1.0  # only on one rank
    scaler.scale(wrapped(batches(4, 8)[rank]).square().mean() * overflows).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 128  # all ranks have detected the overflow
    assert all(torch.equal(a, b) for a, b in zip(before, wrapped.parameters(), strict=True))


def test_scaled_and_clipped_gradients_are_the_same_on_all_ranks(ranks):
    ranks(2)(mixed_precision)


def checkpoints_and_mappings() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    for reentrant, options in (
        (False, {}),
        (False, TINY_BUCKETS),
        (False, {"static_graph": True, **TINY_BUCKETS}),
        (True, {"static_graph": True, **TINY_BUCKETS}),
    ):
        module = Halves(reentrant)
        every = [x.requires_grad_() for x in batches(4, 8)]
        expected = average_gradients(module, lambda m, e=every: [m(x)["y"].square().sum() for x in e])
        wrapped = dist.DistributedDataParallel(module, **options)
        for _ in range(3):
            module.zero_grad()
            wrapped(every[rank])["y"].square().sum().backward()
            require_gradients(module, expected)


def test_checkpoints_under_dicts_are_averaged(ranks):
    ranks(2)(checkpoints_and_mappings)
