"""Training with logical shards gives bitwise equal results on any number of ranks."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from world import Ranks

import paceline as dist
from paceline.train.logical_shards.tree_sum import Node, add, add_up, nodes_within, sum_over_ranks


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Reads the digits in this process, because importing scikit-learn in every rank takes longer than the training."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    return torch.tensor(loaded.images[:150], dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(loaded.target[:150])


class Digits(torch.utils.data.Dataset):
    """Handwritten digits, each with some noise."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, noise: float = 0.1) -> None:
        self.images, self.labels, self.noise = images, labels, noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = self.noise * torch.randn(1, 8, 8) if self.noise else 0
        return self.images[index] + noise, self.labels[index]


class Sequences(torch.utils.data.Dataset):
    """Predicts the next number of a counting sequence."""

    def __len__(self) -> int:
        return 150

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sequence = (index + torch.arange(9)) % 20
        return sequence[:-1], sequence[-1]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("hidden", torch.full((8, 8), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embed(x), mask=self.hidden)[:, -1] @ self.embed.weight.t()


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10),
    )  # fmt: skip


Images = tuple[torch.Tensor, torch.Tensor]


def hash_of(model: nn.Module) -> str:
    tensors = [tensor.detach().numpy().tobytes() for tensor in (*model.parameters(), *model.buffers())]
    return hashlib.sha256(b"".join(tensors)).hexdigest()


def train(
    kind: str, count: int, images: Images, workers: int = 0, file: str = "", steps: int = 9999
) -> tuple[str, list[float]]:
    """Trains for an epoch, but for at most `steps` steps; resumes from the checkpoint `file` if any, and updates it."""
    torch.manual_seed(dist.get_rank())
    model, dataset = (cnn(), Digits(*images)) if kind == "cnn" else (Transformer(), Sequences())
    shards = dist.LogicalShards(model, count, seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = dist.ShardLoader(dataset, 4, shards, num_workers=workers, persistent_workers=workers > 0)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    if file and Path(file).exists():
        for name, state in torch.load(file).items():
            parts[name].load_state_dict(state)
    losses = []
    for batches in itertools.islice(loader, steps):
        torch.rand(dist.get_rank() + 1)  # random numbers drawn elsewhere do not matter
        optimizer.zero_grad()
        loss = shards.backward(lambda xy: nn.functional.cross_entropy(model(xy[0]), xy[1]), batches)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    dist.barrier()
    if file and dist.get_rank() == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    return hash_of(model), losses


def train_wrapped(kind: str, images: Images, accumulate: int = 1) -> str:
    """Trains for an epoch with 16 samples per step, in a conventional loop that works on any number of ranks."""
    torch.manual_seed(dist.get_rank())
    model, dataset = (cnn(), Digits(*images, noise=0)) if kind == "cnn" else (Transformer(), Sequences())
    model = dist.DistributedDataParallel(model, deterministic=True, logical_shards=4, seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = dist.DistributedSampler(dataset, drop_last=True, seed=3)
    loader = torch.utils.data.DataLoader(dataset, 16 // dist.get_world_size(), sampler=sampler, drop_last=True)
    for number, (x, labels) in enumerate(loader, 1):
        torch.rand(dist.get_rank() + 1)
        with contextlib.nullcontext() if number % accumulate == 0 else model.no_sync():
            nn.functional.cross_entropy(model(x), labels).backward()
        if number % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return hash_of(model)


def train_epochs(images: Images) -> list[object]:
    """Returns results that must be the same on 1, 2 and 4 ranks."""
    dist.init_process_group()
    return [
        *(train(kind, 8, images) for kind in ("cnn", "transformer")),
        *(train_wrapped(kind, images) for kind in ("cnn", "transformer")),
        train_wrapped("cnn", images, accumulate=2),
    ]


def test_an_epoch_has_the_same_bits_on_one_two_and_four_ranks(ranks):
    (alone,) = ranks(1)(train_epochs, digits())
    assert ranks(2)(train_epochs, digits()) == [alone] * 2
    assert ranks(4)(train_epochs, digits()) == [alone] * 4
    for _, losses in alone[:2]:
        assert sum(losses[-2:]) < sum(losses[:2])


def in_other_numbers(images: Images, file: str) -> dict[str, tuple[str, list[float]]]:
    """Returns the results with 7 shards, with 4 shards and loader workers, and with 8 shards and a resumed epoch."""
    dist.init_process_group()
    done = {"7 shards": train("cnn", 7, images), "workers": train("cnn", 4, images, int(dist.get_world_size() == 2))}
    if dist.get_world_size() == 1:
        return {**done, "epoch": train("cnn", 8, images)}
    return {**done, "epoch": train("cnn", 8, images, file=file, steps=2 if dist.get_world_size() == 2 else 9999)}


@pytest.fixture(scope="module")
def on_other_numbers(tmp_path_factory):
    """Returns the results of one rank, of two ranks that stop early, and of three ranks that complete the epoch."""
    file = tmp_path_factory.mktemp("epoch") / "checkpoint"
    return [Ranks(size)(in_other_numbers, digits(), str(file))[0] for size in (1, 2, 3)]


def test_the_number_of_shards_need_not_be_a_power_of_two(on_other_numbers):
    alone, two, three = on_other_numbers
    assert two["7 shards"] == three["7 shards"] == alone["7 shards"]


def test_workers_that_read_the_shards_change_no_bit(on_other_numbers):
    alone, two, three = on_other_numbers
    assert two["workers"] == three["workers"] == alone["workers"]


def test_an_epoch_may_be_finished_by_another_number_of_ranks(on_other_numbers):
    alone, begun, ended = on_other_numbers
    assert ended["epoch"][0] == alone["epoch"][0]
    assert begun["epoch"][1] + ended["epoch"][1] == alone["epoch"][1]


def gradients_of_a_step() -> None:
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1)})
    reference = nn.Linear(3, 1)
    reference.load_state_dict(model["used"].state_dict())
    data = torch.randn(22, 3)
    shards = dist.LogicalShards(model, 4)
    loader = dist.ShardLoader(data, 5, shards, shuffle=False)
    steps = list(loader)
    for samples, batches in zip((data[:20], data[20:]), steps, strict=True):
        loss = shards.backward(lambda x: model["used"](x).square().mean(), batches)
        expected = reference(samples).square().mean()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model["used"].weight.grad, reference.weight.grad)  # the sum of both steps
    assert model["unused"].weight.grad is None


def test_the_gradient_is_that_of_the_mean_over_the_step(ranks):
    ranks(3)(gradients_of_a_step)


def add_by_each_way() -> None:
    """Compares sums of six shards in the core, of five shards in slices, and of one shard that only rank 1 has."""
    dist.init_process_group()
    group, rank = dist.new_group(), dist.get_rank()
    made = torch.Generator().manual_seed(0)
    values = [[(9 * torch.randn(shape, generator=made)).to(dtype) for dtype, shape in KINDS] for _ in range(6)]
    for runs in ([(0, 2), (2, 4), (4, 6)], [(0, 2), (2, 3), (3, 5)], [(0, 0), (0, 1), (0, 0)]):
        root = Node(0, runs[-1][1] or 1)
        nodes = [nodes_within(range(*run), root) for run in runs]
        leaves = {shard: [each.clone() for each in values[shard]] for shard in range(*runs[rank])}
        mine = {node: add_up(node, add, leaves.__getitem__, {}) for node in nodes[rank]}
        before = {node: [each.clone() for each in kept] for node, kept in mine.items()}
        total = sum_over_ranks(mine, nodes, root.stop, group)
        whole = {shard: [each.clone() for each in values[shard]] for shard in range(root.stop)}
        expected = add_up(root, add, whole.__getitem__, {})
        for one, other in zip(total, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
            one.zero_()
        for node, kept in before.items():
            assert all(map(torch.equal, mine[node], kept))


KINDS = [
    (torch.float32, (50_001,)),
    (torch.float32, ()),
    (torch.bfloat16, (7, 5)),
    (torch.int64, (3,)),
    (torch.float64, (9,)),
]


def test_sums_over_ranks_leave_what_they_were_given(ranks):
    ranks(3)(add_by_each_way)


def share_what_cannot_be_shared() -> None:
    dist.init_process_group()
    with pytest.raises(ValueError, match=r"rank \d: 1 shards cannot be shared by 2 ranks; use a count"):
        dist.LogicalShards(nn.Linear(1, 1), 1)
    with pytest.raises(TypeError, match="pass the module inside"):
        dist.LogicalShards(dist.DistributedDataParallel(nn.Linear(1, 1)), 2)
    with pytest.raises(dist.CollectiveMismatchError, match="seed=0; rank 1: seed=1"):
        dist.LogicalShards(nn.Linear(1, 1), 2, seed=dist.get_rank())
    wrap = functools.partial(dist.DistributedDataParallel, nn.Linear(1, 1), deterministic=True)
    with pytest.raises(ValueError, match="deterministic=True needs logical_shards"):
        wrap()
    for count in (1, 6):
        with pytest.raises(ValueError, match=rf"rank \d: logical_shards is {count} with 2 ranks; both must be powers"):
            wrap(logical_shards=count)
    with pytest.raises(TypeError, match="'weight' has sparse gradients"):
        dist.DistributedDataParallel(nn.Embedding(2, 2, sparse=True), deterministic=True, logical_shards=2)
    for refused in (lambda m: m.join(), lambda m: m.register_comm_hook(None, print)):
        with pytest.raises(ValueError, match="got a module with deterministic=True"):
            refused(wrap(logical_shards=2))
    with pytest.raises(ValueError, match="a batch of 3 samples cannot be divided among the 2 shards of a rank"):
        wrap(logical_shards=4)(torch.ones(3, 1))
    shards = dist.LogicalShards(nn.Linear(1, 1), 2)
    with pytest.raises(ValueError, match="batch_size is 0; it must be at least 1"):
        dist.ShardLoader(range(4), 0, shards)


def test_what_cannot_be_shared_is_refused_with_the_reason(ranks):
    ranks(2)(share_what_cannot_be_shared)
