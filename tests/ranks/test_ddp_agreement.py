"""After twenty steps, the parameters agree with torch's DistributedDataParallel over gloo, for many models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from training import require_equal_on_all_ranks

import paceline as dist

STEPS = 20


class Residual(nn.Module):
    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        width = channels * stride
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels, width, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(20, 8), nn.LSTM(8, 12, 2, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(x))[0][:, -1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(x)))).mean(1)


class Bag(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8, sparse=sparse), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x).mean(1))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Conditional(nn.Module):
    """Each rank selects a branch in each step based on its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.left(x) if x[0, 0] > 0 else self.right(x)))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6, dtype=torch.complex128), nn.Linear(6, 3, dtype=torch.complex128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x.to(torch.complex128)))).abs()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


class Mixed(nn.Module):
    """Layers of float32, float64 and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        types = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for dtype in types)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


def images(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(6, 1, 8, 8, generator=generator)


def words(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 20, (6, 5), generator=generator)


def vectors(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(6, 8, generator=generator)


@dataclass(frozen=True)
class Kind:
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], torch.Tensor]
    options: dict[str, object] = field(default_factory=dict)
    tolerance: float = 1e-6


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def cnn() -> nn.Module:
    convolutions = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(144, 3)).to(memory_format=torch.channels_last)


def resnet() -> nn.Module:
    blocks = [nn.Conv2d(1, 4, 3, padding=1), Residual(4), Residual(4, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


KINDS = {
    "MLP": Kind(mlp, vectors),
    "CNN with BatchNorm": Kind(cnn, images),
    "ResNet": Kind(resnet, images, tolerance=1e-5),
    "transformer": Kind(Transformer, words, tolerance=1e-5),
    "LSTM": Kind(Lstm, words),
    "tied weights": Kind(Tied, words),
    "dense embedding": Kind(lambda: Bag(sparse=False), words),
    "sparse embedding": Kind(lambda: Bag(sparse=True), words),
    "unused parameters": Kind(Unused, vectors, {"find_unused_parameters": True}),
    "conditional": Kind(Conditional, vectors, {"find_unused_parameters": True}),
    "complex": Kind(Complex, vectors),
    "frozen part": Kind(Frozen, vectors),
    # bfloat16 has about three significant digits, and gloo sums in a different order.
    "mixed types": Kind(Mixed, vectors, tolerance=2e-2),
}


def train_beside_torchs(name: str) -> None:
    kind, rank = KINDS[name], dist.get_rank()
    torch.manual_seed(rank)  # different on each rank: wrapping must make them the same
    early = dist.DistributedDataParallel(kind.build(), bucket_cap_mb=0.001, overlap=True, **kind.options)
    late = dist.DistributedDataParallel(copy.deepcopy(early.module), overlap=False, **kind.options)
    torchs = nn.parallel.DistributedDataParallel(copy.deepcopy(early.module), **kind.options)
    models = [(model, torch.optim.SGD(model.parameters(), 0.1)) for model in (early, late, torchs)]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x, target = kind.batch(generator), torch.randint(0, 3, (6,), generator=generator)
        for model, optimizer in models:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), target).backward()
            optimizer.step()
    for key, expected in torchs.state_dict().items():
        found, also_found = early.state_dict()[key], late.state_dict()[key]
        torch.testing.assert_close(found, expected, rtol=10 * kind.tolerance, atol=kind.tolerance)
        assert torch.equal(found, also_found), key
    require_equal_on_all_ranks(early.parameters())


def train_all_beside_torchs(file: str) -> dict[str, str]:
    """Trains a model of each kind; returns the differences from torch's, by kind."""
    import torch.distributed as gloo

    dist.init_process_group()
    size = dist.get_world_size()
    gloo.init_process_group("gloo", init_method=f"file://{file}", rank=dist.get_rank(), world_size=size)
    wrong = {}
    for name in KINDS:
        try:
            train_beside_torchs(name)
        except AssertionError as error:
            wrong[name] = str(error)
    gloo.destroy_process_group()
    return wrong


def test_twenty_steps_of_every_kind_of_model_end_where_torchs_do(ranks, tmp_path):
    assert ranks(2)(train_all_beside_torchs, str(tmp_path / "gloo")) == [{}, {}]
