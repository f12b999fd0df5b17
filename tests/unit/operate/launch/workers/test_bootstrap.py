"""The startup of a worker."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest

from paceline.operate.diagnosis import worker_process
from paceline.operate.launch import failures
from paceline.operate.launch.workers import bootstrap


def test_the_bootstrap_answers_the_signal_that_is_sent():
    source = Path(bootstrap.__file__).read_text()
    assert f'_new_file(f"{worker_process.FILE}-{{os.getpid()}}")' in source
    assert "faulthandler.register(signal.SIGRTMAX - 7" in source
    assert worker_process.SIGNAL == signal.SIGRTMAX - 7


def test_an_exception_is_recorded_in_spite_of_an_interruption(monkeypatch, tmp_path):
    recorded = []

    def record(path, error):
        recorded.append(error)
        if len(recorded) == 1:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed")

    monkeypatch.setattr(failures, "record_uncaught", record)
    monkeypatch.setattr(sys, "path", [*sys.path])
    first, later = ValueError("bad"), RuntimeError("raised later")
    recorder = bootstrap._ExceptionRecorder(str(tmp_path / "error"))
    recorder.record(first)
    recorder.record(later)
    assert recorded == [first, first]


@pytest.mark.parametrize("code", [None, 0, 3, "no data"])
def test_the_line_of_an_exit_is_recorded(monkeypatch, tmp_path, code):
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = str(tmp_path / "error")
    recorder = bootstrap._ExceptionRecorder(path)
    assert failures.read_exit(path) == ("", "")
    try:
        sys.exit(code)
    except SystemExit as error:
        recorder.record_exit(error)
        line = error.__traceback__.tb_lineno
    message = "no data" if code == "no data" else ""
    assert failures.read_exit(path) == (f"{Path(__file__).name}:{line}", message)


def test_a_traceback_is_printed_if_the_hook_cannot_be_imported(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "__excepthook__", lambda *error: printed.append(error))
    monkeypatch.setitem(sys.modules, failures.__name__, None)  # as if a user's file hid a module that it imports
    bootstrap._print_uncaught()
    error = ValueError("bad")
    sys.excepthook(ValueError, error, None)
    assert printed == [(ValueError, error, None)]


def test_an_exception_that_ends_a_thread_is_recorded(monkeypatch, tmp_path):
    printed = []
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(threading, "excepthook", printed.append)
    bootstrap._record_thread_errors(str(tmp_path / "error"))

    def fail():
        raise ValueError("bad image")

    for _ in range(2):  # only the first exception is kept
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    line = fail.__code__.co_firstlineno + 1
    recorded = (tmp_path / "error.thread").read_text()
    assert (recorded, len(printed)) == (f"ValueError: bad image ({Path(__file__).name}:{line})", 2)
