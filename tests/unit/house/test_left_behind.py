"""Directories left by killed test runs are removed; directories of runs in progress are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from left_behind import PREFIX, make_directory, remove_abandoned

BEGINS = "import left_behind, tempfile; print(tempfile.mkdtemp(), flush=True); input()"


def test_the_directory_of_a_killed_run_is_removed_by_the_next(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2] / "support")}
    del environment["PACELINE_TESTS_DIRECTORY"]
    options = {"env": environment, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", BEGINS], **options) as run:
        temporary = Path(run.stdout.readline().strip())
        assert temporary.parent.parent == tmp_path and temporary.parent.name.startswith(PREFIX)
        remove_abandoned(str(tmp_path))
        assert temporary.exists(), "the run has not ended"
        run.kill()
    assert temporary.exists()
    remove_abandoned(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_removed_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    flock, removed = __import__("fcntl").flock, []

    def remove_first(lock: int, operation: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].rmdir()
        flock(lock, operation)

    monkeypatch.setattr("left_behind.fcntl.flock", remove_first)
    path, lock = make_directory(str(tmp_path))
    os.close(lock)
    assert [Path(path)] == list(tmp_path.iterdir()) != removed
