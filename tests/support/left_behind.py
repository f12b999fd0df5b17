"""The directory for recordings of jobs and processes during the tests; it is removed at the end of the test run."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

_DIRECTORY = tempfile.mkdtemp(prefix="paceline-tests-")

os.environ["PACELINE_RUNS_DIR"] = f"{_DIRECTORY}/runs"
os.environ["PACELINE_RECORD_DIR"] = f"{_DIRECTORY}/records"


def _remove(maker: int) -> None:
    if os.getpid() == maker:
        shutil.rmtree(_DIRECTORY, ignore_errors=True)


atexit.register(_remove, os.getpid())
