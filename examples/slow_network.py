"""Trains the model from char_lm.py over a slow network: ranks train separately and occasionally average their changes.

paceline run --nproc-per-node 2 examples/slow_network.py
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn

import paceline as dist

arguments = argparse.ArgumentParser(description="A character language model with DiLoCo")
arguments.add_argument("--steps", type=int, default=700)
arguments.add_argument("--batch-size", type=int, default=16, help="text windows per rank and step")
arguments.add_argument("--every", type=int, default=16, help="number of steps between exchanges of a part of the model")
arguments.add_argument(
    "--wire", default="int4", choices=["bf16", "int8", "int4"], help="data type in which parts are sent"
)
options = arguments.parse_args()
CONTEXT, WIDTH, LAYERS = 96, 128, 3

dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same model on every rank; the batches below differ by rank

sources = sorted(Path(os.__file__).parent.glob("*.py"))
text = torch.tensor(list("\n".join(path.read_text(errors="ignore") for path in sources).encode("ascii", "ignore")))
train, test = text[: int(0.95 * len(text))], text[int(0.95 * len(text)) :]


class Model(nn.Module):
    """Predicts each character from the preceding ones."""

    def __init__(self) -> None:
        super().__init__()
        self.character = nn.Embedding(128, WIDTH)
        self.place = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.character(x) + self.place, mask=self.mask, is_causal=True)
        return self.norm(hidden) @ self.character.weight.t()


model = Model()
nn.init.normal_(model.character.weight, std=0.05)
inner = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
schedule = torch.optim.lr_scheduler.OneCycleLR(inner, 4e-3, total_steps=options.steps, pct_start=0.1)
outer = torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.3, nesterov=True)  # for about 40 rounds
diloco = dist.DiLoCo(model, inner, outer, every=options.every, fragments=4, wire=options.wire)
generator = torch.Generator().manual_seed(rank)


def batch(source: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `size` windows at random positions, and the same windows shifted by one character."""
    at = torch.randint(len(source) - CONTEXT, (size, 1), generator=generator) + torch.arange(CONTEXT)
    return source[at], source[at + 1]


def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


started = time.perf_counter()
for step in range(1, options.steps + 1):
    inner.zero_grad()
    loss = loss_of(*batch(train, options.batch_size))
    loss.backward()
    inner.step()
    schedule.step()
    diloco.step()
    if rank == 0 and (step % 100 == 0 or step == options.steps):
        print(f"step {step:5}/{options.steps}  loss {loss:.3f} nats/char  {time.perf_counter() - started:4.0f} s")
diloco.finish()
waited = diloco.communication_wait_s() / (time.perf_counter() - started)

model.eval()
with torch.no_grad():
    held_out = loss_of(*batch(test, 256))
dist.all_reduce(held_out, dist.ReduceOp.AVG)
if rank == 0:
    print(f"held-out text: {held_out:.3f} nats/char; waiting for exchanges {waited:.1%} of the time")
    fewer = options.every * 32 // {"bf16": 16, "int8": 8, "int4": 4}[options.wire]
    print(f"""
Result: {world_size} ranks trained separately and exchanged their changes as {options.wire} once every {options.every}
steps. This sends about 1/{fewer} of the bytes that averaging float32 gradients in each step sends (char_lm.py).""")
dist.destroy_process_group()
