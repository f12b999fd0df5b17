"""Trains on handwritten digits. When restarted, resumes from the newest checkpoint, on any number of ranks.

paceline run --nproc-per-node 2 examples/checkpoints.py --steps 200     (stop it with Ctrl-C, kill it, or let it finish)
paceline run --nproc-per-node 3 examples/checkpoints.py --steps 400     (resumes where the first run stopped)
paceline checkpoint inspect build/digits-checkpoints

A checkpoint appears only when it is complete, so a restart always finds a complete one, however the run was killed.
"""

import argparse
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline as dist

arguments = argparse.ArgumentParser(description="Handwritten digits, with checkpoints")
arguments.add_argument("--steps", type=int, default=200)
arguments.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
arguments.add_argument("--directory", default="build/digits-checkpoints")
options = arguments.parse_args()

dist.init_process_group()
torch.manual_seed(0)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)

model = dist.DistributedDataParallel(
    nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
# The position in the epoch is part of the checkpoint: after a restart, no sample is repeated or skipped.
loader = dist.StatefulLoader(TensorDataset(images, labels), batch_size=32, remainder="repeat")

state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
with dist.CheckpointManager(options.directory, every=options.every, keep=3) as manager:
    step = first = manager.restore(state) or 0
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks start at step {step}")
    while step < options.steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            began = time.perf_counter()
            if manager.save(step, state, force=step == options.steps) and dist.get_rank() == 0:
                stall_ms = (time.perf_counter() - began) * 1e3
                print(f"step {step:4}  loss {loss.item():.3f}  saving blocked the loop for {stall_ms:.1f} ms")
            if step == options.steps:
                break
if dist.get_rank() == 0:
    kept = ", ".join(sorted(path.name for path in Path(options.directory).glob("step_*")))
    began = f"continued from the checkpoint at step {first}" if first else "started without a checkpoint"
    print(f"""
Result: training {began} and has reached step {step}. {options.directory} contains {kept}.
To continue from there on a different number of ranks: paceline run --nproc-per-node 3 {__file__} --steps {step + 200}
To see what is saved: paceline checkpoint inspect {options.directory}""")
dist.destroy_process_group()
