"""`paceline.breakpoint`: a debugger on one rank, while the others wait."""

from __future__ import annotations

import os
from datetime import timedelta

import forked_launcher
import pytest
from terminal import Terminal

import paceline as dist

SCRIPT = """
import sys, time
from datetime import timedelta
import torch
import paceline as dist
dist.init_process_group()
world = dist.GroupMember.WORLD
for rank in map(int, sys.argv[1:]):
    world.set_timeout(timedelta(seconds=0.5))
    here = f"frame of the caller for rank {rank}"
    dist.breakpoint(rank, timeout_s=None)
    world.set_timeout(timedelta(seconds=60))
    after = torch.ones(1)
    dist.all_reduce(after)
    print("sum", rank, after.item(), flush=True)
    time.sleep(0.5)  # a line that appears while the next prompt is edited may be overwritten by it
"""


def test_any_rank_gets_the_terminal_while_others_wait(script):
    with Terminal("--nproc-per-node=2", script(SCRIPT), "0", "1") as terminal:
        for rank in range(2):
            terminal.wait_for("(Pdb) ")
            terminal.type("p here, dist.get_rank()\r")
            terminal.wait_for(f"('frame of the caller for rank {rank}', {rank})")
            terminal.wait_for("(Pdb) ")
            terminal.interrupt()
            terminal.wait_for("--KeyboardInterrupt--")
            terminal.type("import time; time.sleep(1)\r")  # longer than the timeout of the group
            terminal.type("n\r")
            terminal.wait_for("-> world.set_timeout(timedelta(seconds=60))")
            terminal.type("c\r")
        rows = terminal.end()
    assert terminal.exit_code == 0
    said = [f"[rank {each}] sum {rank} 2.0" for each in range(2) for rank in range(2)]
    assert [line for line in said if not any(line in row for row in rows)] == [], rows  # a prompt may precede it


def test_ctrl_c_after_continue_ends_the_job(script):
    text = SCRIPT + "import time\ntime.sleep(60)\n"
    with Terminal("--nproc-per-node=1", script(text), "0") as terminal:
        terminal.wait_for("(Pdb) ")
        terminal.type("c\r")
        terminal.wait_for("[rank 0] sum")
        terminal.interrupt()
        terminal.end()
    assert terminal.exit_code == 1


def test_a_rank_without_anything_to_type_into_says_so(script):
    done = forked_launcher.run("--nproc-per-node=2", "--stdin=none", script(SCRIPT), "1")
    assert done.returncode == 1
    assert "breakpoint: rank 1 has no terminal and its stdin is empty" in done.stderr
    assert "`paceline run --stdin 1`" in done.stderr


def test_calls_are_skipped_by_the_line_they_come_from(script):
    text = """
import paceline as dist
dist.init_process_group()
for step in range(4):
    dist.breakpoint(skip=2)
"""
    done = forked_launcher.run(script(text), says="p 'at', step\nc\np 'at', step\nc\n")
    assert done.returncode == 0, done.stderr
    assert "('at', 2)" in done.stdout
    assert "('at', 3)" in done.stdout
    assert "('at', 1)" not in done.stdout


def stop_in_the_debugger(path: str) -> float:
    """Runs a plain process with `path` as its stdin, as under multiprocessing."""
    import torch

    dist.init_process_group()
    with open(path) as typed:
        os.dup2(typed.fileno(), 0)
    timeout = dist.group.WORLD.timeout
    value = torch.ones(1)
    dist.breakpoint(1)
    assert dist.group.WORLD.timeout == max(timeout, timedelta(hours=1))
    dist.all_reduce(value)
    return value.item()


def test_plain_processes_read_their_stdin(ranks, tmp_path):
    typed = tmp_path / "typed"
    typed.write_text("value += 2\nc\n")
    assert ranks(2)(stop_in_the_debugger, str(typed)) == [4.0, 4.0]


def ask_for_an_absent_rank() -> str:
    dist.init_process_group()
    with pytest.raises(ValueError, match="rank 2 is not in the default group of 2 ranks") as caught:
        dist.breakpoint(2)
    return str(caught.value)


def test_a_rank_that_is_not_there_is_refused(ranks):
    assert len(set(ranks(2)(ask_for_an_absent_rank))) == 1
