"""The startup of a worker."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

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


def test_the_line_of_an_exit_with_an_error_code_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = str(tmp_path / "error")
    recorder = bootstrap._ExceptionRecorder(path)
    for code in (None, 0, 3):
        assert failures.read_exit_line(path) == ""
        try:
            sys.exit(code)
        except SystemExit as error:
            recorder.record_exit(error)
            line = error.__traceback__.tb_lineno
    assert failures.read_exit_line(path) == f"{Path(__file__).name}:{line}"
