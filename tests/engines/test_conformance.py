"""Every engine does what the interface promises: one world for each engine and size, and a test for each program."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest
from conftest import Ranks

from engines import mpirun
from engines.conformance import programs, run_all

_TIMEOUT_S = 100
_WORLDS = [("paceline", 2), ("gloo", 2), ("gloo", 3), *((library, 2) for library in mpirun.LIBRARIES)]


def _backend(engine: str) -> str:
    return "mpi" if engine in mpirun.LIBRARIES else engine


@functools.cache
def _reports(engine: str, size: int) -> dict[str, str]:
    """How each program failed, of all ranks, by its name."""
    if engine not in mpirun.LIBRARIES:
        answers = Ranks(size)(run_all, engine, timeout_s=_TIMEOUT_S)
        return _merged(answers)
    library = mpirun.find(engine)
    assert library is not None
    with tempfile.TemporaryDirectory() as directory:
        mpirun.run(library, size, [directory], _TIMEOUT_S)
        return _merged([json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(size)])


def _merged(answers: list[object]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for answer in answers:
        assert isinstance(answer, dict)
        for name, report in answer.items():
            merged[name] = merged.get(name, "") + report
    return merged


@pytest.mark.parametrize(
    ("engine", "size", "program"),
    [(engine, size, program) for engine, size in _WORLDS for program in programs(_backend(engine))],
)
def test_an_engine_conforms(engine, size, program):
    if engine in mpirun.LIBRARIES and mpirun.find(engine) is None:
        pytest.skip(f"there is no {engine} in this environment; `make test` installs it")
    reports = _reports(engine, size)
    assert program in reports, f"not reached: {list(reports)[-1]} failed before"
    assert not reports[program], reports[program]
