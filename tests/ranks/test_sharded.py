"""Training in logical shards: the same bits on any number of ranks."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as dist


class Digits(torch.utils.data.Dataset):
    """Handwritten digits, each with some noise."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.images = torch.tensor(digits.images[:300], dtype=torch.float32).unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target[:300])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index] + 0.1 * torch.randn(1, 8, 8), self.labels[index]


class Sequences(torch.utils.data.Dataset):
    """What is next in a sequence that counts on."""

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


def train(kind: str, count: int, workers: int = 0, file: str = "", steps: int = 9999) -> tuple[str, list[float]]:
    """An epoch, or the rest of the one that `file` has a checkpoint of; left after so many steps, with a checkpoint."""
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    model, dataset = (cnn(), Digits()) if kind == "cnn" else (Transformer(), Sequences())
    shards = dist.LogicalShards(model, count, seed=7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = dist.ShardLoader(dataset, 4, shards, num_workers=workers, persistent_workers=workers > 0)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    if file and Path(file).exists():
        for name, state in torch.load(file).items():
            parts[name].load_state_dict(state)
    losses = []
    for batches in itertools.islice(loader, steps):
        torch.rand(dist.get_rank() + 1)  # what others draw does not matter
        optimizer.zero_grad()
        loss = shards.backward(lambda xy: nn.functional.cross_entropy(model(xy[0]), xy[1]), batches)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    dist.barrier()
    if file and dist.get_rank() == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    tensors = [tensor.detach().numpy().tobytes() for tensor in (*model.parameters(), *model.buffers())]
    return hashlib.sha256(b"".join(tensors)).hexdigest(), losses


@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_an_epoch_has_the_same_bits_on_one_two_and_four_ranks(ranks, kind):
    (alone,) = ranks(1)(train, kind, 8)
    assert ranks(2)(train, kind, 8) == [alone] * 2
    assert ranks(4)(train, kind, 8) == [alone] * 4
    losses = alone[1]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_numbers_of_ranks_and_of_shards_need_not_be_powers_of_two(ranks):
    (alone,) = ranks(1)(train, "cnn", 7)
    assert ranks(2)(train, "cnn", 7) == [alone] * 2
    assert ranks(3)(train, "cnn", 7) == [alone] * 3


def test_workers_of_the_loader_do_not_change_a_bit(ranks):
    (alone,) = ranks(1)(train, "cnn", 4)
    assert ranks(2)(train, "cnn", 4, 1) == [alone] * 2


def test_an_epoch_begun_by_two_ranks_and_ended_by_three_has_the_same_bits(ranks, tmp_path):
    ((parameters, losses),) = ranks(1)(train, "cnn", 8)
    begun = ranks(2)(train, "cnn", 8, 0, str(tmp_path / "checkpoint"), 4)[0]
    ended = ranks(3)(train, "cnn", 8, 0, str(tmp_path / "checkpoint"))[0]
    assert ended[0] == parameters
    assert begun[1] + ended[1] == losses


def gradients() -> None:
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
    torch.testing.assert_close(model["used"].weight.grad, reference.weight.grad)  # of both steps together
    assert model["unused"].weight.grad is None


def test_the_gradient_is_that_of_the_mean_over_the_step_and_adds_up(ranks):
    ranks(3)(gradients)


def refusals() -> None:
    dist.init_process_group()
    with pytest.raises(ValueError, match=r"rank \d: 1 shards cannot be shared by 2 ranks; use a count"):
        dist.LogicalShards(nn.Linear(1, 1), 1)
    with pytest.raises(TypeError, match="give it the module inside"):
        dist.LogicalShards(dist.DistributedDataParallel(nn.Linear(1, 1)), 2)
    with pytest.raises(dist.CollectiveMismatchError, match="seed=0; rank 1: seed=1"):
        dist.LogicalShards(nn.Linear(1, 1), 2, seed=dist.get_rank())
    shards = dist.LogicalShards(nn.Linear(1, 1), 2)
    with pytest.raises(ValueError, match="batch_size is 0; it must be at least 1"):
        dist.ShardLoader(range(4), 0, shards)


def test_what_cannot_be_shared_is_refused_with_the_reason(ranks):
    ranks(2)(refusals)
