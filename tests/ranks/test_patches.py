"""`paceline run --compat torch`: an unmodified torch.distributed program uses Paceline's engine."""

from __future__ import annotations

import pytest
from forked_launcher import run

from paceline.interop.torch_backend import patches
from paceline.operate.launch.workers.environment import compat_variables, parse_libraries

# Prints the classes of two groups, their backends according to torch, and a sum.
PROGRAM = """
import torch
import torch.distributed as dist
dist.init_process_group({arguments})
x = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(x)
pair = dist.new_group()
dist.monitored_barrier()
print(type(dist.group.WORLD).__name__, type(pair).__name__, dist.get_backend(), dist.get_backend(pair), x.tolist())
dist.destroy_process_group()
"""
SPAWNING = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=1)
    x = torch.ones(1)
    dist.all_reduce(x)
    print(type(dist.group.WORLD).__name__, x.item())
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, args=(sys.argv[1],), nprocs=1)
"""


def words(stdout: str) -> list[str]:
    return sorted(line.partition("] ")[2] for line in stdout.splitlines())


def test_every_group_of_gloo_is_ours(script):
    done = run("--compat", "torch", "--nproc-per-node", "2", script(PROGRAM.format(arguments='"gloo"')))
    assert done.returncode == 0, done.stderr
    assert words(done.stdout) == ["TorchProcessGroup TorchProcessGroup gloo gloo [3.0, 3.0, 3.0]"] * 2
    told = [line for line in done.stderr.splitlines() if "--compat torch" in line]
    assert len(told) == 1, "the change is told once"
    assert "group of 2 ranks" in told[0]
    assert "uses Paceline's engine" in told[0]


def test_a_program_that_names_no_backend_is_taken_over(script):
    text = PROGRAM.format(arguments="").replace("dist.monitored_barrier()\n", "")
    done = run("--compat", "torch", script(text))
    assert done.returncode == 0, done.stderr
    (told,) = words(done.stdout)
    assert told.startswith("TorchProcessGroup TorchProcessGroup")


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_a_world_size_above_the_launchers_is_refused_at_once(script, backend):
    done = run("--nproc-per-node", "2", script(PROGRAM.format(arguments=f'"{backend}", world_size=3')))
    assert done.returncode == 1
    assert "world_size is 3, but the launcher has started 2 ranks" in done.stderr


def test_processes_that_a_script_spawns_are_taken_over(script, tmp_path):
    done = run("--compat", "torch", script(SPAWNING), str(tmp_path / "rendezvous"))
    assert done.returncode == 0, done.stderr
    assert words(done.stdout) == ["TorchProcessGroup 1.0"]


def test_without_the_flag_nothing_changes(script):
    done = run(script("import os; print(sorted(n for n in os.environ if 'COMPAT' in n))"))
    assert words(done.stdout) == ["[]"]


def test_the_variables_reach_what_a_script_starts():
    chosen = compat_variables(("torch", "horovod"), {"PYTHONPATH": "mine"})
    assert chosen["PACELINE_COMPAT"] == "torch,horovod"
    assert chosen["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"
    assert chosen["PYTHONPATH"].endswith(":mine")
    assert compat_variables((), {}) == {}


@pytest.mark.parametrize(
    ("asked", "has_gpus", "release", "ours"),
    [
        ("gloo", False, (2, 13), "paceline"),
        ("undefined", False, (2, 13), "paceline"),
        ("cpu:gloo,cuda:nccl", False, (2, 13), "paceline"),
        ("gloo", True, (2, 13), "paceline"),
        ("gloo", True, (2, 14), "cpu:paceline,cuda:gloo"),
        ("cpu:gloo,cuda:nccl", True, (2, 13), None),
        ("cpu:gloo,cuda:nccl", True, (2, 14), "cpu:paceline,cuda:nccl"),
        ("nccl", True, (2, 14), None),
        ("paceline", False, (2, 14), None),
    ],
)
def test_what_takes_the_place_of_a_backend(monkeypatch, asked, has_gpus, release, ours):
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(has_gpus))
    monkeypatch.setattr(patches, "release", lambda: release)
    assert patches.in_place_of(asked) == ours


def test_only_known_libraries_are_stood_in_for():
    assert parse_libraries("horovod, torch") == ("horovod", "torch")
    with pytest.raises(Exception, match="torch or horovod"):
        parse_libraries("mpi")
