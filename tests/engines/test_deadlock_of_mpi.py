"""A deadlock between groups that use the engine "mpi" without a launcher: the ranks' errors and their recordings."""

from __future__ import annotations

import re
import sys

import pytest

from engines import mpirun
from paceline.cli.main import main

_PROGRAM = """
import os, sys
os.environ["PACELINE_RECORD_DIR"] = sys.argv[1]
import torch
import paceline as dist
dist.init_process_group("mpi", timeout=60)
one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
for group in (one, two) if dist.get_rank() == 0 else (two, one):
    try:
        dist.all_reduce(torch.ones(4), group=group, timeout=2)
    except dist.errors.CollectiveTimeoutError as error:
        print(error, flush=True)
        os._exit(0)  # without finalizing MPI, which Open MPI's mpirun reports as a failure
"""


@pytest.mark.parametrize("library", mpirun.LIBRARIES)
def test_two_groups_that_wait_for_each_other_are_named(library, tmp_path, capsys):
    found = mpirun.find(library)
    if found is None:
        pytest.skip(f"there is no {library} in this environment; `make test` installs it")
    script, recordings = tmp_path / "script.py", tmp_path / "recordings"
    script.write_text(_PROGRAM)
    told = mpirun.run_program(found, 2, [sys.executable, str(script), str(recordings)], 60, may_fail=True)
    assert "The ranks wait for each other: all of them must make the calls and messages" in told
    assert main(["analyze", str(recordings)]) == 1
    found_later = capsys.readouterr().out
    # mpirun may kill one rank when the other exits, and the recording of a killed rank shows that it is still in its
    # call.
    assert all(re.search(f"rank {rank} wait(s|ed) in ", found_later.partition("deadlock: ")[2]) for rank in range(2))
    for number in (1, 2):
        call = f"all_reduce(float32, 4) call 2 of the group of ranks [0, 1] (no. {number} of 2) (script.py:10)"
        assert call in found_later
