"""Join: ranks with different numbers of inputs train together, as with torch's Join."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from training import batches, mlp, require_equal_on_all_ranks

import paceline as dist
from paceline.train.ddp import hooks


class Sometimes(nn.Module):
    """Uses its second layer only if the input begins with a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return self.sometimes(y) if x[0, 0] > 0 else y


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


def like_torchs(file: str) -> None:
    import torch.distributed as gloo

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    gloo.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    for build, options in (
        (mlp, {}),
        (mlp, {"bucket_cap_mb": 0.0003}),
        (normalized, {}),
        (Sometimes, {"find_unused_parameters": True}),
    ):
        for divide in (True, False):
            torch.manual_seed(0)
            module = build()
            mine = dist.DistributedDataParallel(copy.deepcopy(module), **options)
            overlapped = dist.DistributedDataParallel(copy.deepcopy(module), **options, overlap=True)
            torchs = nn.parallel.DistributedDataParallel(copy.deepcopy(module), **options)
            for model in (mine, overlapped, torchs):
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                with model.join(divide_by_initial_world_size=divide):
                    for step in range(2 + 2 * rank):
                        optimizer.zero_grad()
                        model(batches(4, 8, step=step)[rank]).square().sum(1).mean().backward()
                        optimizer.step()
            for name, expected in torchs.module.named_parameters():
                for model in (mine, overlapped):
                    torch.testing.assert_close(
                        model.module.get_parameter(name),
                        expected,
                        rtol=1e-5,
                        atol=1e-6,
                        msg=lambda m, n=name: f"{n}: {m}",
                    )
            require_equal_on_all_ranks([*mine.parameters(), *mine.buffers()])
    gloo.destroy_process_group()


def test_uneven_inputs_end_where_torchs_do(ranks, tmp_path):
    ranks(3)(like_torchs, str(tmp_path / "gloo"))


def divide_gradients() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    for divide, expected in ((True, [1.5, 1.0]), (False, [1.5, 2.0])):
        for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            layer = nn.Linear(1, 1, bias=False)
            model = dist.DistributedDataParallel(layer, **options)
            seen = []
            with model.join(divide_by_initial_world_size=divide):
                for _ in range(1 + rank):
                    model.zero_grad()
                    model(torch.tensor([[1.0 + rank]])).sum().backward()
                    seen.append(layer.weight.grad.item())
            assert seen == expected[: 1 + rank]
    model.zero_grad()
    model(torch.tensor([[1.0 + rank]])).sum().backward()  # outside the join context
    assert layer.weight.grad.item() == 1.5


def test_gradients_are_divided_by_all_or_by_the_joined_ranks(ranks):
    ranks(2)(divide_gradients)


def hooked_like_torchs(file: str) -> None:
    import torch.distributed as gloo
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    gloo.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    for divide in (True, False):
        for name in ("allreduce_hook", "fp16_compress_hook"):
            seen = []
            for wrap, functions in (
                (dist.DistributedDataParallel, hooks),
                (nn.parallel.DistributedDataParallel, default_hooks),
            ):
                layer = nn.Linear(1, 1, bias=False)
                model = wrap(layer)
                model.register_comm_hook(None, getattr(functions, name))
                gradients = []
                with model.join(divide_by_initial_world_size=divide):
                    for _ in range(1 + rank):
                        model.zero_grad()
                        model(torch.tensor([[1.0 + rank]])).sum().backward()
                        gradients.append(layer.weight.grad.item())
                seen.append(gradients)
            assert seen[0] == seen[1] == [1.5, 1.0][: 1 + rank]
    model = dist.DistributedDataParallel(
        nn.Linear(1, 1, bias=False), mixed_precision=_MixedPrecision(reduce_dtype=torch.float16)
    )
    with model.join(divide_by_initial_world_size=False):
        for _ in range(1 + rank):
            model.zero_grad()
            model(torch.tensor([[1.0 + rank]])).sum().backward()
    assert model.module.weight.grad.item() == [1.5, 2.0][rank]
    gloo.destroy_process_group()


def test_a_hook_determines_its_own_divisor_as_in_torch(ranks, tmp_path):
    ranks(2)(hooked_like_torchs, str(tmp_path / "gloo"))


def accumulating_with_a_hook() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    layer = nn.Linear(1, 1, bias=False)
    model = dist.DistributedDataParallel(layer)
    model.register_comm_hook(None, hooks.allreduce_hook)
    with model.join():
        for _ in range(1 + rank):
            model.zero_grad()
            with model.no_sync():
                model(torch.ones(1, 1)).sum().backward()
            model(torch.ones(1, 1)).sum().backward()
    assert layer.weight.grad.item() == (1 if rank else 2)


def test_no_sync_and_communication_hooks_work_in_it(ranks):
    ranks(2)(accumulating_with_a_hook)


def sharded_optimizers() -> None:
    dist.init_process_group()
    rank = dist.get_rank()

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, joined: list[dist.Joinable], divide: bool) -> None:
        with dist.Join(joined, divide_by_initial_world_size=divide):
            for step in range(1 + 2 * rank):
                optimizer.zero_grad()
                model(batches(4, 8, step=step)[rank]).square().sum(1).mean().backward()
                optimizer.step()

    for divide in (True, False):
        reference = dist.DistributedDataParallel(normalized())
        train(reference, torch.optim.AdamW(reference.parameters(), 0.01), [reference], divide)
        for stage, wrap in ((1, True), (1, False), (2, True), (2, False)):
            model = dist.DistributedDataParallel(normalized()) if wrap else normalized()
            optimizer = dist.ZeroRedundancyOptimizer(model, torch.optim.AdamW, stage=stage, lr=0.01)
            train(model, optimizer, [model, optimizer] if wrap else [optimizer], divide)
            plain = model.module if wrap else model
            for mine, expected in zip(plain.parameters(), reference.module.parameters(), strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
            require_equal_on_all_ranks(plain.buffers())
    optimizer.zero_grad()
    model(batches(4, 8)[rank]).sum().backward()  # outside the join context
    sharded = dist.ZeroRedundancyOptimizer(normalized(), torch.optim.AdamW, stage=3, lr=0.01)
    with pytest.raises(ValueError, match="stage=3, whose parameters are gathered in forward.* use stage=2"):
        dist.Join([sharded])


def test_a_sharded_optimizer_steps_on_after_its_inputs_end(ranks):
    ranks(3)(sharded_optimizers)


class Counter(dist.Joinable):
    """Counts the ranks that ran each step."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: list[float] = []
        self.last: bool | None = None

    def step(self, value: float = 1.0) -> None:
        dist.Join.notify_join_context(self)
        total = torch.tensor(value)
        dist.all_reduce(total)
        self.totals.append(total.item())

    def join_hook(self, **kwargs: object) -> dist.JoinHook:
        counter = self

        class Shadow(dist.JoinHook):
            def main_hook(self) -> None:
                zero = torch.tensor(0.0)
                dist.all_reduce(zero)

            def post_hook(self, is_last_joiner: bool) -> None:
                counter.last = is_last_joiner

        assert kwargs in ({}, {"divide_by_initial_world_size": False})
        return Shadow()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return dist.GroupMember.WORLD


def several_joinables() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    layer = nn.Linear(1, 1, bias=False)
    first, model, second = Counter(), dist.DistributedDataParallel(layer), Counter()
    with dist.Join([first, model, second], divide_by_initial_world_size=False):
        for _ in range(2 + rank):
            first.step()
            model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            second.step(2.0)
            assert layer.weight.grad.item() == 1
    assert first.totals == [3, 3, 2, 1][: 2 + rank]
    assert second.totals == [6, 6, 4, 2][: 2 + rank]
    assert first.last is (rank == 2)


def test_anything_that_communicates_can_join(ranks):
    ranks(3)(several_joinables)


def terminated_early() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    model = dist.DistributedDataParallel(nn.Linear(1, 1))
    told = "rank 0 ran out of inputs while others?" if rank == 0 else "rank 1: 1 of 2 ranks ran out of inputs"
    steps = 0

    def train() -> None:
        nonlocal steps
        with model.join(throw_on_early_termination=True):
            for _ in range(2 + 5 * rank):
                model(torch.ones(1, 1)).sum().backward()
                steps += 1

    with pytest.raises(RuntimeError, match=told):
        train()
    assert steps == 2
    dist.barrier()


def test_it_can_end_on_all_ranks_when_one_runs_out(ranks):
    ranks(2)(terminated_early)


def disabled_or_wrong() -> None:
    dist.init_process_group()
    model = dist.DistributedDataParallel(nn.Linear(1, 1))
    with model.join(enable=False):
        model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(ValueError, match="no joinables; pass at least one"):
        dist.Join([])
    other = dist.DistributedDataParallel(nn.Linear(1, 1), process_group=dist.new_group())
    with pytest.raises(ValueError, match="all must have one process group"):
        dist.Join([model, other])
    with pytest.raises(KeyError, match="mine"), model.join():
        raise KeyError("mine")  # the error is raised without waiting for other ranks
    assert not model._join_config.enable


def test_it_can_be_switched_off_and_tells_mistakes(ranks):
    ranks(2)(disabled_or_wrong)
