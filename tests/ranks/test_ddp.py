"""DistributedDataParallel against torch's, and on its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import paceline as dist


class Unused(nn.Module):
    """Each rank leaves out another layer; one layer is used by nobody."""

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


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


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
    return Transformer() if kind == "transformer" else Unused()


def batch(kind: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    target = torch.randint(0, 3, (6,), generator=generator)
    if kind == "transformer":
        return torch.randint(0, 20, (6, 5), generator=generator), target
    shape = (6, 1, 8, 8) if kind == "cnn" else (6, 8)
    return torch.randn(shape, generator=generator), target


def loss_of(output: object, target: torch.Tensor) -> torch.Tensor:
    logits = output["logits"][0] if isinstance(output, dict) else output
    return nn.functional.cross_entropy(logits, target)


def require_equal_on_all_ranks(module: nn.Module) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        low, high = tensor.detach().clone(), tensor.detach().clone()
        dist.broadcast(low, 0)
        assert torch.equal(low, high)


def like_torch(kind: str, file: str) -> None:
    import torch.distributed as gloo

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    gloo.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    torch.manual_seed(rank)  # different on each rank: wrapping must make them the same
    ours = build(kind)
    options = {"find_unused_parameters": kind == "unused"}
    wrapped = dist.DistributedDataParallel(ours, bucket_cap_mb=0.001, **options)
    theirs = copy.deepcopy(ours)
    reference = nn.parallel.DistributedDataParallel(theirs, **options)
    models = [
        (wrapped, torch.optim.SGD(wrapped.parameters(), 0.1)),
        (reference, torch.optim.SGD(reference.parameters(), 0.1)),
    ]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(20):
        x, target = batch(kind, generator)
        for model, optimizer in models:
            optimizer.zero_grad()
            loss_of(model(x), target).backward()
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)
    assert list(wrapped.state_dict()) == list(reference.state_dict())
    wrapped.eval()
    require_equal_on_all_ranks(nn.ParameterList(ours.parameters()))
    gloo.destroy_process_group()


@pytest.mark.parametrize("kind", ["mlp", "cnn", "transformer", "unused"])
def test_twenty_steps_end_where_torchs_do(ranks, kind, tmp_path):
    ranks(2)(like_torch, kind, str(tmp_path / "gloo"))


def accumulate() -> None:
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
    require_equal_on_all_ranks(nn.ParameterList(nn.Parameter(p.grad) for p in wrapped.parameters()))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_sync_accumulates_and_the_next_backward_reduces_all(ranks, size):
    ranks(size)(accumulate)


def unused() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Unused()
    wrapped = dist.DistributedDataParallel(model, find_unused_parameters=True)
    x = torch.full((2, 8), 1.0 if rank == 0 else -1.0)
    loss_of(wrapped(x), torch.tensor([0, 1])).backward()
    assert model.layers[3].weight.grad is None  # used by nobody
    assert model.layers[0].weight.grad is not None and model.layers[1].weight.grad is not None
    with pytest.raises(AssertionError):  # and layer 2 is used by both, so it is not half of one rank's
        assert model.layers[2].weight.grad is None

    strict = dist.DistributedDataParallel(Unused())
    loss = loss_of(strict(torch.full((2, 8), 1.0)), torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match=r"(?s)layers\.1\.weight.*find_unused_parameters=True"):
        loss.backward()


def test_unused_parameters_are_handled_or_named(ranks):
    ranks(2)(unused)


def construction() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    with pytest.raises(
        dist.CollectiveMismatchError, match=r"rank 0 has parameter 'weight' of shape \[3, 2\].*rank 1 has.*\[4, 2\]"
    ):
        dist.DistributedDataParallel(nn.Linear(2, 3 + rank))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(RuntimeError, match="no parameter"):
        dist.DistributedDataParallel(frozen)
    with pytest.raises(TypeError, match="sparse=False"):
        dist.DistributedDataParallel(nn.Embedding(3, 3, sparse=True))
    with pytest.raises(ValueError, match="GPU"):
        dist.DistributedDataParallel(nn.Linear(2, 2), device_ids=[0])
    wrapped = dist.DistributedDataParallelCPU(nn.Linear(2, 2))
    wrapped.module.extra = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="changed after wrapping"):
        wrapped(torch.ones(1, 2))
    dist.barrier()


def test_what_cannot_be_wrapped_is_refused_on_every_rank(ranks):
    ranks(2)(construction)


def buffers_and_more() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    wrapped = dist.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    wrapped.module[1].running_mean.fill_(float(rank))
    wrapped(torch.randn(3, 4))
    mean = wrapped.module[1].num_batches_tracked.clone()
    assert mean.item() == 1
    wrapped.module[1].running_mean.fill_(float(rank))
    with torch.no_grad():
        wrapped.eval()
        if rank == 0:
            wrapped(torch.randn(3, 4))  # evaluation on one rank alone waits for nobody
    wrapped.train()
    wrapped.module[1].momentum = 0.0
    wrapped(torch.randn(3, 4)).sum().backward()
    assert (wrapped.module[1].running_mean == 0).all()
    assert wrapped.communication_wait_s() > 0
    assert set(wrapped.state_dict()) == {f"module.{name}" for name in wrapped.module.state_dict()}

    static = dist.DistributedDataParallel(Unused(), static_graph=True)
    for _ in range(3):
        static.zero_grad()
        loss_of(static(torch.full((2, 8), 1.0)), torch.tensor([0, 1])).backward()
    require_equal_on_all_ranks(
        nn.ParameterList(nn.Parameter(p.grad) for p in static.parameters() if p.grad is not None)
    )


def test_buffers_evaluation_and_static_graphs(ranks):
    ranks(2)(buffers_and_more)


def train_until_killed() -> str:
    import os
    import signal

    dist.init_process_group()
    wrapped = dist.DistributedDataParallel(build("mlp"))
    for step in range(1000):
        loss = loss_of(wrapped(torch.randn(6, 8)), torch.zeros(6, dtype=torch.int64))
        if step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            loss.backward()
        except dist.PeerLostError as error:
            return f"{error.rank} {error}"
    return "never"


def test_a_rank_killed_before_its_backward_ends_the_others_backward(ranks):
    with ranks(3).start(train_until_killed) as world:
        told = world.join(20, expect_dead=frozenset({1}))
    assert told[0].startswith("1 rank 1 (") and "died" in told[0]
    assert told[2].startswith("1 rank 1 (")
