"""The connection of an elastic worker belongs to the worker, and not to the processes that it starts."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from paceline.train.elastic.launcher_connection import FD_VARIABLE, NAME_VARIABLE, LauncherConnection


def test_without_an_elastic_launcher_there_is_no_connection():
    assert LauncherConnection.of_environment({}) is None


def test_a_process_without_the_connection_is_refused():
    reading, writing = os.pipe()
    try:
        with pytest.raises(RuntimeError, match=r"does not have the connection of worker 0\.1\.0 to the launcher"):
            LauncherConnection.of_environment({FD_VARIABLE: str(reading), NAME_VARIABLE: "0.1.0"})
    finally:
        os.close(reading)
        os.close(writing)


def test_a_process_that_imports_the_script_is_refused(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match=r"worker 0\.1\.0: the script runs again"):
        LauncherConnection.of_environment({FD_VARIABLE: "1000", NAME_VARIABLE: "0.1.0"})
