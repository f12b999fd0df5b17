"""Saves and loads a checkpoint as in PyTorch's tutorial, shows the pitfalls, and does the same with paceline.save.

paceline run --nproc-per-node 2 examples/checkpoints_by_hand.py

Rank 0 saves, a barrier follows, and all ranks load with `map_location`. This is correct, with a few caveats.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

import paceline as dist

dist.init_process_group()
rank = dist.get_rank()
torch.manual_seed(0)


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 1))


def tell(text: str) -> None:
    if rank == 0:
        print(text)


model = dist.DistributedDataParallel(new_model())
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(rank)  # each rank has its own batches
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()

shared = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(shared)
directory = Path(str(shared[0]))
path = directory / "model.pt"

# The tutorial's method, with two additions: a temporary file replaces the checkpoint only once its data is on disk, and
# rank 0 reports the result to the other ranks, so that they do not wait in a barrier after rank 0 has raised an error.
outcome = [""]
if rank == 0:
    try:
        with open(f"{path}.new", "wb") as file:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.new", path)
        folder = os.open(directory, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as error:
        outcome = [f"rank 0 could not save: {error}"]
dist.broadcast_object_list(outcome)  # a barrier that also reports whether the save succeeded
if outcome[0]:
    raise SystemExit(outcome[0])
loaded = torch.load(path, map_location="cpu", weights_only=True)  # on GPUs, pass the rank's device
model.module.load_state_dict(loaded["model"])
optimizer.load_state_dict(loaded["optimizer"])
tell(f"by hand: {path.stat().st_size} bytes, all written by rank 0")

# Pitfall 1: if the job dies while a file is being written in place, the file is truncated and the old checkpoint is
# lost.
if rank == 0:
    torn = directory / "torn.pt"
    shutil.copy(path, torn)  # the old checkpoint
    with open(path, "rb") as source, open(torn, "wb") as target:  # the new one, interrupted halfway
        target.write(source.read(path.stat().st_size // 2))
    try:
        torch.load(torn, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError) as error:
        print(f"pitfall 1, torch.save in place, interrupted: {type(error).__name__}: {str(error).splitlines()[0][:80]}")

# Pitfall 2: the wrapper's names begin with `module.`, so an unwrapped model cannot load them.
try:
    new_model().load_state_dict(model.state_dict())
    tell("pitfall 2: the wrapper's state_dict has the names of the unwrapped model")
except RuntimeError as error:
    tell(f"pitfall 2, the wrapper's state_dict: {str(error).splitlines()[1].strip()[:80]}")

# Pitfall 3: without a barrier, rank 0 could remove the file before a slower rank has loaded it.
dist.barrier()
if rank == 0:
    path.unlink()

# The same with paceline.save: each rank writes a part, no incomplete checkpoint appears, and any number of ranks can
# load it.
state = {"model": model, "optimizer": optimizer, "step": 5}
dist.save(state, directory / "checkpoints", step=5)
state["step"] = 0
dist.load(state, directory / "checkpoints")
files = sorted(each.name for each in (directory / "checkpoints" / "step_0000000005").iterdir())
tell(f"paceline.save: step {state['step']}, {', '.join(files)}")
tell("""
Result: saving by hand works, but rank 0 writes everything, a job that dies while saving leaves a damaged file
(pitfall 1), and the names depend on the wrapper (pitfall 2). With paceline.save, each rank writes its part, and an
incomplete checkpoint never replaces a complete one.""")

dist.barrier()
if rank == 0:
    shutil.rmtree(directory)
dist.destroy_process_group()
