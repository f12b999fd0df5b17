"""Trains a small CNN on scikit-learn's handwritten digits, on any number of processes.

paceline run --nproc-per-node 2 examples/digits.py      (or, on one process: python examples/digits.py)
"""

import argparse
import hashlib
import os
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as dist

arguments = argparse.ArgumentParser(description="Handwritten digits, trained data-parallel")
arguments.add_argument("--epochs", type=int, default=20)
arguments.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
options = arguments.parse_args()

if "RANK" in os.environ:
    dist.init_process_group()
else:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[:1437], order[1437:]
dataset = TensorDataset(images[train], labels[train])

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10),
)  # fmt: skip
model = dist.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
steps = options.epochs * -(-len(train) // (world_size * options.batch_size))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
sampler = dist.DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=options.batch_size, sampler=sampler)


def accuracy() -> float:
    """Returns the accuracy on the test images. Each rank evaluates a part of them."""
    model.eval()
    mine = test[rank::world_size]
    with torch.no_grad():
        right = (model(images[mine]).argmax(1) == labels[mine]).sum()
    model.train()
    dist.all_reduce(right)
    return right.item() / len(test)


started = time.perf_counter()
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
    reached = accuracy()
    if rank == 0:
        bar = "█" * (20 * (epoch + 1) // options.epochs)
        rate = (epoch + 1) * len(train) / (time.perf_counter() - started)
        print(f"{bar:░<20} epoch {epoch + 1:2}  loss {loss.item():.3f}  accuracy {reached:6.2%}  {rate:6.0f} samples/s")
elapsed = time.perf_counter() - started

digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).digest()
digests = [torch.empty(32, dtype=torch.uint8) for _ in range(world_size)]
dist.all_gather(digests, torch.tensor(list(digest), dtype=torch.uint8))
same = all(torch.equal(each, digests[0]) for each in digests)
if rank == 0:
    print(f"""
    ranks                          {world_size}
    test accuracy                  {reached:.2%}
    samples/s                      {options.epochs * len(train) / elapsed:,.0f}
    waiting for communication      {model.communication_wait_s() / elapsed:.1%} of the time
    parameters, SHA-256            {", ".join(bytes(each.tolist()).hex()[:16] for each in digests)}
    parameters bitwise equal       {"yes" if same else "NO"}

Result: {world_size} rank(s) trained one model on {options.epochs * len(train):,} samples and averaged their gradients
in each step, so all ranks have the same parameters.""")
dist.destroy_process_group()
if not same:
    raise SystemExit("the ranks' parameters differ")
