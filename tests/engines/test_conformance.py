"""Conformance of every engine to the interface: one world per engine and size, and a test for each program."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest
from one_world import merged, require
from world import Ranks

from engines import mpirun
from engines.conformance import programs, run_all

_TIMEOUT_S = 100
_WORLDS = [("paceline", 2), ("gloo", 2), ("gloo", 3), *((library, 2) for library in mpirun.LIBRARIES)]


def _backend(engine: str) -> str:
    return "mpi" if engine in mpirun.LIBRARIES else engine


@functools.cache
def _reports(engine: str, size: int) -> dict[str, str]:
    """Returns the failure of each program on all ranks, by name."""
    if engine not in mpirun.LIBRARIES:
        return merged(Ranks(size)(run_all, engine, timeout_s=_TIMEOUT_S))
    library = mpirun.find(engine)
    assert library is not None
    with tempfile.TemporaryDirectory() as directory:
        mpirun.run(library, size, [directory], _TIMEOUT_S)
        return merged(json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(size))


@pytest.mark.parametrize(
    ("engine", "size", "program"),
    [(engine, size, program) for engine, size in _WORLDS for program in programs(_backend(engine))],
)
def test_an_engine_conforms(engine, size, program):
    if engine in mpirun.LIBRARIES and mpirun.find(engine) is None:
        pytest.skip(f"there is no {engine} in this environment; `make test` installs it")
    require(_reports(engine, size), program)
