"""The directory of a test run, which contains every temporary file of its processes.

A run removes its directory when it ends. If a run is killed, the next run removes the directory of the killed one. Each
run holds a lock on its directory, and the kernel releases the lock when all processes of the run have exited.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

PREFIX = "paceline-session-"

_VARIABLE = "PACELINE_TESTS_DIRECTORY"  # set in all processes that a test run starts; they share its directory
_WORKER = "PYTEST_XDIST_WORKER"


def make_directory(root: str) -> tuple[str, int]:
    """Creates a directory for a test run; returns it with the descriptor that holds the lock."""
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX, dir=root)
        with contextlib.suppress(FileNotFoundError):  # another run considered it abandoned before it was locked
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(path):
                return path, lock
            os.close(lock)


def remove_abandoned(root: str) -> None:
    """Removes the directories of test runs that have been killed. Several processes may do so at the same time."""
    for path in Path(root).glob(f"{PREFIX}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # it has been removed, or belongs to another user
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:  # the run has not ended
            pass
        finally:
            os.close(lock)


def _begin() -> str:
    root = tempfile.gettempdir()
    remove_abandoned(root)
    path, _ = make_directory(root)
    # Finalizers run in the order of their priorities; multiprocessing removes its own directory with priority -100.
    Finalize(None, shutil.rmtree, [path], {"ignore_errors": True}, exitpriority=-200)
    os.environ[_VARIABLE] = os.environ["TMPDIR"] = tempfile.tempdir = path
    # pytest keeps the files from its latest runs, and torch keeps its compiled kernels.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", root)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{root}/torchinductor_{getpass.getuser()}")
    return path


_directory = Path(os.environ[_VARIABLE] if _VARIABLE in os.environ else _begin(), os.environ.get(_WORKER, "main"))
os.environ["PACELINE_RUNS_DIR"] = str(_directory / "runs")
os.environ["PACELINE_RECORD_DIR"] = str(_directory / "records")
