"""The text and the model from examples/char_lm.py, for benchmarks that train the model with other methods."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

CONTEXT, WIDTH, LAYERS = 96, 128, 3
_HELD_OUT_WINDOWS = 256
_HELD_OUT_TIMES = 4


class Model(nn.Module):
    """Predicts each character from the characters before it."""

    def __init__(self) -> None:
        super().__init__()
        self.character = nn.Embedding(128, WIDTH)
        self.place = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)
        nn.init.normal_(self.character.weight, std=0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.character(x) + self.place, mask=self.mask, is_causal=True)
        return self.norm(hidden) @ self.character.weight.t()


@dataclass(frozen=True)
class Text:
    """The source code of Python's standard library; the last twentieth is held out."""

    train: torch.Tensor
    test: torch.Tensor

    @staticmethod
    def read() -> Text:
        sources = sorted(Path(os.__file__).parent.glob("*.py"))
        text = "\n".join(path.read_text(errors="ignore") for path in sources).encode("ascii", "ignore")
        whole = torch.tensor(list(text))
        return Text(whole[: int(0.95 * len(whole))], whole[int(0.95 * len(whole)) :])


def batch(source: torch.Tensor, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns windows at random positions, and the same windows shifted by one character."""
    at = torch.randint(len(source) - CONTEXT, (size, 1), generator=generator) + torch.arange(CONTEXT)
    return source[at], source[at + 1]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, test: torch.Tensor) -> float:
    """Returns the mean loss over a set of windows that is the same in every run."""
    generator = torch.Generator().manual_seed(1)
    losses = [loss_of(model, *batch(test, _HELD_OUT_WINDOWS, generator)) for _ in range(_HELD_OUT_TIMES)]
    return float(torch.stack(losses).mean())
