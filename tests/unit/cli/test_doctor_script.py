"""What the doctor finds in a script, on which line, and what it leaves alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from paceline.cli.doctor.script import check_script
from paceline.cli.main import main

GOOD = """
import os, torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
dist.init_process_group()
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model.to("cuda")
sampler = DistributedSampler(data)
loader = DataLoader(data, sampler=sampler)
state = torch.load("x.pt", map_location="cpu")
for epoch in range(3):
    sampler.set_epoch(epoch)
    dist.all_reduce(loss)
    if rank == 0:
        torch.save(state, "x.pt")
    dist.barrier()
torch.save(state, f"x-{rank}.pt")
if dist.get_rank() == 0:
    dist.send(t, 1)
else:
    dist.recv(t, 0)
if rank == 0:
    dist.broadcast(t, 0)
else:
    dist.broadcast(u, 0)
"""

BAD = [  # rule, line with the mistake
    ("first-gpu", 'model.to("cuda:0")'),
    ("first-gpu", 'device = torch.device("cuda:0")'),
    ("first-gpu", "torch.cuda.set_device(0)"),
    ("first-gpu", "model.cuda()"),
    ("first-gpu", "model.cuda(0)"),
    ("first-gpu", 'model.to("cuda")'),
    ("no-sampler", "loader = DataLoader(data, batch_size=8, shuffle=True)"),
    ("shuffle", "loader = DataLoader(data, sampler=s, shuffle=True)"),
    ("no-set-epoch", "s = torch.utils.data.distributed.DistributedSampler(data)"),
    ("not-all-ranks", "if rank == 0: dist.all_reduce(t)"),
    ("not-all-ranks", "if dist.get_rank() == 0: dist.barrier()"),
    ("not-all-ranks", "if not rank: torch.distributed.broadcast(t, 0)"),
    ("not-all-ranks", 'if int(os.environ["RANK"]) == 0: dist.barrier()'),
    ("not-all-ranks", "if args.local_rank in (-1, 0) and epoch: dist.all_gather(o, t)"),
    ("not-all-ranks", "if rank != 0: dist.barrier()"),
    ("not-all-ranks", "if is_main_process(): paceline.barrier()"),
    ("all-ranks-save", 'torch.save(model.state_dict(), "x.pt")'),
    ("all-ranks-save", 'if rank != 0: torch.save(s, "x.pt")'),
    ("all-ranks-save", 'model.save_pretrained("out")'),
    ("no-map-location", 'state = torch.load("x.pt")'),
]


def found(text: str) -> list[tuple[str, int | None]]:
    return [(each.about, each.line) for each in check_script(text)]


def test_a_script_without_mistakes_has_no_findings():
    assert found(GOOD) == []


@pytest.mark.parametrize(("rule", "line"), BAD, ids=[f"{rule}-{number}" for number, (rule, _) in enumerate(BAD)])
def test_a_mistake_is_found_on_its_line(rule, line):
    assert found(f"import torch\n\n{line}\n") == [(rule, 3)]


@pytest.mark.parametrize(
    "text",
    [
        "is_main = rank == 0\nif is_main:\n    torch.save(s, 'x')",
        "def save():\n    if rank != 0:\n        return\n    torch.save(s, 'x')",
        "if rank > 0:\n    pass\nelse:\n    torch.save(s, 'x')",
        "if world_size == 0:\n    dist.barrier()",
        "from functools import reduce\nif rank == 0:\n    reduce(f, xs)",
        "if rank == 0:\n    def late():\n        dist.barrier()",
        "loader = DataLoader(d, 8, False, sampler)",
        "with open('x', 'rb') as f: s = torch.load(f, 'cpu')",
        "torch.cuda.set_device(local_rank)\nmodel.cuda()",
    ],
)
def test_what_is_right_is_left_alone(text):
    assert found(text) == []


def test_a_collective_that_the_others_return_before_is_found():
    assert found("def log():\n    if rank != 0:\n        return\n    dist.barrier()") == [("not-all-ranks", 4)]


def test_every_finding_has_a_reason_and_a_fix():
    for _, line in BAD:
        for each in check_script(line):
            assert each.seen
            assert each.reason
            assert each.fix


def test_the_command_prints_line_reason_and_fix_and_fails(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("import torch\ns = torch.load('x.pt')\n")
    assert main(["doctor", str(path)]) == 1
    told = capsys.readouterr().out
    assert re.search(r" BAD  .*train.py:2: no-map-location: torch.load without map_location\n +why: .*\n +fix: ", told)
    assert main(["doctor", "--json", str(path)]) == 1
    assert json.loads(capsys.readouterr().out)[0]["line"] == 2


def test_what_is_no_python_is_said(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("def (:\n")
    assert main(["doctor", str(path)]) == 2
    assert "invalid syntax" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[3] / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_our_examples_have_none_of_them(path):
    assert check_script(path.read_text()) == []
