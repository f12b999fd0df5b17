"""Trains a small transformer on the source code of Python's standard library, and then completes a line with it.

paceline run --nproc-per-node 2 examples/char_lm.py
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn

import paceline as dist

arguments = argparse.ArgumentParser(description="A character language model, trained data-parallel")
arguments.add_argument("--steps", type=int, default=700)
arguments.add_argument("--batch-size", type=int, default=16, help="text windows per rank and step")
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
model = dist.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=options.steps, pct_start=0.1)
generator = torch.Generator().manual_seed(rank)


def batch(source: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `size` windows at random positions, and the same windows shifted by one character."""
    at = torch.randint(len(source) - CONTEXT, (size, 1), generator=generator) + torch.arange(CONTEXT)
    return source[at], source[at + 1]


def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


started = time.perf_counter()
for step in range(1, options.steps + 1):
    optimizer.zero_grad()
    loss = loss_of(*batch(train, options.batch_size))
    loss.backward()
    optimizer.step()
    schedule.step()
    if step in (1, 10) or step % 100 == 0 or step == options.steps:
        dist.all_reduce(loss := loss.detach(), dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step:5}/{options.steps}  loss {loss:.3f} nats/char  {time.perf_counter() - started:4.0f} s")

model.eval()
with torch.no_grad():
    held_out = loss_of(*batch(test, 256))
dist.all_reduce(held_out, dist.ReduceOp.AVG)
if rank == 0:
    print(f"held-out text: {held_out:.3f} nats/char; waiting for communication "
          f"{model.communication_wait_s() / (time.perf_counter() - started):.1%} of the time")  # fmt: skip
    line = torch.tensor([list(b"import os\n\n\ndef ")])
    while line.shape[1] < 160:
        with torch.no_grad():
            logits = model.module(nn.functional.pad(line[:, -CONTEXT:], (0, max(0, CONTEXT - line.shape[1]))))
        chances = logits[0, min(line.shape[1], CONTEXT) - 1].div(0.7).softmax(0)
        line = torch.cat([line, torch.multinomial(chances, 1, generator=generator)[None]], 1)
    continued = bytes(line[0].tolist()).decode("ascii", "replace")
    print(f"the model continues the first line as follows:\n{continued}\n")
    windows = options.steps * options.batch_size * world_size
    print(f"Result: {world_size} ranks trained one model on {windows:,} windows of text. In each step, every rank "
          f"computed the gradients for {options.batch_size} of them, and the ranks averaged these.")  # fmt: skip
dist.destroy_process_group()
