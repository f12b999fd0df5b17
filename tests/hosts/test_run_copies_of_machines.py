"""After a machine is lost with its disk, its replacement restores the copy from another launcher's memory."""

from __future__ import annotations

import shutil

from hosts.machines import Machines

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import paceline as dist

dist.init_process_group()
directory = Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(40, 30)
optimizer = dist.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01)  # each rank has a part of the state
state = {"model": model, "optimizer": optimizer}
manager = dist.CheckpointManager(directory / f"disk-{os.uname().nodename}", peer_copies=1, shared=False)

def train(step):
    optimizer.zero_grad()
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()
    optimizer.step()
    print("step", step, hash(tuple(model.weight.detach().flatten().tolist())), flush=True)

done = manager.restore(state)
first = done is None
for step in range(1, 4) if first else ():
    train(step)
    manager.save(step, state)
manager.close()
for step in range(4, 7):  # what is not saved is trained again
    train(step)
if first:
    (directory / f"trained-{os.environ['RANK']}").touch()
    time.sleep(1000)
"""


def steps_said(text: str) -> dict[str, set[str]]:
    """Returns the digests that ranks printed, by step."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if "step " in line:
            _, step, digest = line[line.index("step ") :].split()
            found.setdefault(step, set()).add(digest)
    return found


def test_a_replacement_restores_from_the_memory_of_a_peer(machines) -> None:
    here: Machines = machines(3)
    here.script.write_text(SCRIPT)
    staying = here.elastic(0, "2:2")
    here.expect_line(staying, "1 of 2 machines have joined")  # copies are found by rank 0's path, which is on this host
    lost = here.elastic(1, "2:2")
    here.wait(lambda: all((here.directory / f"trained-{rank}").exists() for rank in (0, 1)))
    lost.kill()
    here.wait(lambda: "was lost: " in here.said(staying))
    shutil.rmtree(here.directory / "disk-h1")
    replacement = here.elastic(2, "2:2")
    here.expect(replacement, 0)
    here.expect(staying, 0)
    assert "restored step 3 from memory; the launcher of this host had 2 of the 2 files" in here.said(staying)
    steps = steps_said(here.said(staying, "out") + here.said(replacement, "out"))
    assert sorted(steps) == ["1", "2", "3", "4", "5", "6"]
    assert all(len(digests) == 1 for digests in steps.values()), "what was trained again has other bits"
