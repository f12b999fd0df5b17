"""Workers that are forked after one import of torch behave like new interpreters."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from launching import ENVIRONMENT, command, run, wait_until

NUMBERS = """
import sys
assert {"torch", "numpy"} <= {*sys.modules}, "they were imported before the fork"
import random, torch, numpy
print("drawn", torch.rand(1).item(), numpy.random.rand(), random.random(), torch.initial_seed(), flush=True)
"""

MAIN = """
import os, sys, tempfile
names = {name: type(value).__name__ for name, value in sorted(globals().items()) if name.startswith("__")}
print(names, __builtins__.__name__, sys.orig_argv[-2:], sys.argv[1:], __spec__, flush=True)
"""

ARGUMENTS = "import sys; print('arguments', len(sys.argv), sys.argv[-1], flush=True)"


def test_forked_workers_draw_numbers_of_their_own(script):
    done = run("--nproc-per-node=2", script(NUMBERS))
    assert done.returncode == 0, done.stderr
    drawn = [line.split("drawn ")[1].split() for line in done.stdout.splitlines()]
    assert len(drawn) == 2
    assert all(mine != theirs for mine, theirs in zip(*drawn, strict=True)), drawn


def test_the_main_module_is_that_of_a_new_interpreter(script):
    path = script(MAIN)
    outputs = []
    for method in ("forkserver", "spawn"):
        done = run("--nproc-per-node=2", f"--start-method={method}", path, "a", "b")
        assert done.returncode == 0, done.stderr
        outputs.append(sorted(done.stdout.splitlines()))
    assert outputs[0] == outputs[1]


def test_a_long_command_line_reaches_forked_workers(script):
    words = [f"/data/shard-{number:06}.tar" for number in range(14_000)]  # more than a socket's buffer holds
    done = run("--nproc-per-node=2", "--start-method=forkserver", script(ARGUMENTS), *words)
    assert done.returncode == 0, done.stderr
    expected = [f"[rank {rank}] arguments {len(words) + 1} {words[-1]}" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_ends_the_job(script, number):
    words = command("--nproc-per-node=2", script("import torch\nprint('started')"))
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as job:
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children")

        def templates() -> list[int]:
            pids = map(int, children.read_text().split())
            return [pid for pid in pids if b"template.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]

        wait_until(templates)
        [template] = templates()
        job.send_signal(number)
        said, errors = job.communicate(timeout=60)
    assert (job.returncode, said) == (1, ""), errors
    assert f"{number.name}: the job ends before its workers have started" in errors
    assert not os.path.exists(f"/proc/{template}")
