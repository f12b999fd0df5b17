"""Trains on handwritten digits while workers are killed; the result is bitwise equal to that of an undisturbed run.

python examples/unbreakable.py                                                          (one process, undisturbed)
paceline run --elastic --nproc-per-node 4 --chaos kill:1s,seed=7 examples/unbreakable.py

`make chaos` runs both and compares the digests of the final parameters, buffers and optimizer state.
"""

import argparse
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline as dist

arguments = argparse.ArgumentParser(description="Handwritten digits, trained while workers may be killed")
arguments.add_argument("--epochs", type=int, default=12)
arguments.add_argument("--digest-file", type=Path, help="the file to which rank 0 writes the digest of the final state")
options = arguments.parse_args()

dist.init_process_group(elastic=True)
torch.manual_seed(0)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[:1437], order[1437:]

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * 23)

shards = dist.LogicalShards(model, 8)
loader = dist.ShardLoader(TensorDataset(images[train], labels[train]), batch_size=8, shards=shards)
test_loader = dist.ShardLoader(TensorDataset(images[test], labels[test]), batch_size=45, shards=shards, shuffle=False)
state = dist.ElasticState(shards, optimizer=optimizer, schedule=schedule, loader=loader)

latest = time.perf_counter()
for epoch in state.epochs(options.epochs):
    longest = 0.0
    for batches in loader:
        optimizer.zero_grad()
        loss = shards.backward(lambda xy: nn.functional.cross_entropy(model(xy[0]), xy[1]), batches)
        optimizer.step()
        schedule.step()
        longest, latest = max(longest, time.perf_counter() - latest), time.perf_counter()
    right = shards.evaluate(lambda xy: (model(xy[0]).argmax(1) == xy[1]).sum(), test_loader)
    if dist.get_rank() == 0:
        bar = "█" * (20 * (epoch + 1) // options.epochs)
        workers = f"{dist.get_world_size()} worker" + "s" * (dist.get_world_size() > 1)
        print(
            f"{bar:░<20} epoch {epoch + 1:2}  accuracy {right.item() / len(test):6.2%}  {workers:9}  "
            f"longest step {longest * 1e3:4.0f} ms"
        )

digest = state.digest()
if dist.get_rank() == 0:
    print(f"SHA-256 of the final state: {digest}")
    print("Result: the final state does not depend on the number of workers or on which of them are killed. Every run "
          f"ends with this digest, for example: python {__file__} --epochs {options.epochs}")  # fmt: skip
    if options.digest_file is not None:
        options.digest_file.write_text(digest)
dist.destroy_process_group()
