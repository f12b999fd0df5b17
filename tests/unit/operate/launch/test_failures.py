"""Records of failures, and other parts of the launcher that require no process."""

from __future__ import annotations

import select
import signal
import time
from pathlib import Path

import pytest
from msgspec import structs
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from paceline.operate.launch.failures import (
    TORCH_SUFFIX,
    ExceptionNotice,
    Record,
    WorkerFailure,
    crash_line,
    describe,
    first_failure,
    read_record,
    record_uncaught,
    shortened,
    write_record,
)
from paceline.operate.launch.multinode.protocol import LARGEST, WorkersStopped, encode


def failure(rank: int, seen_s: float, kind: str | None = None, exit_code: int = 1) -> WorkerFailure:
    record = Record(seen_s, kind, "Traceback ...") if kind else None
    return WorkerFailure(rank, 1000 + rank, exit_code, seen_s, record)


def test_the_first_failure_is_the_one_that_explains_the_others():
    lost, cause = failure(0, 1.0, "PeerLostError"), failure(2, 1.5, "ValueError")
    assert first_failure([lost, cause, failure(1, 2.0, "KeyError")]) is cause
    assert first_failure([lost, failure(1, 3.0, None, -9)]).rank == 1


def test_a_failure_reads_with_rank_pid_and_signal():
    assert "rank 1 failed first (" in describe(failure(1, 0.0, "ValueError"))
    assert "pid 1001, killed by SIGKILL); if it was not killed manually, the machine ran out of memory" in describe(
        failure(1, 0.0, None, -signal.SIGKILL)
    )


def test_an_exception_is_recorded_and_read_back(tmp_path: Path):
    path = str(tmp_path / "error.json")
    assert read_record(path) is None
    try:
        raise ValueError("boom")
    except ValueError as error:
        write_record(path, type(error), error, error.__traceback__)
    record = read_record(path)
    assert record is not None
    assert record.kind == "ValueError"
    assert record.text.endswith("ValueError: boom\n")


def test_an_error_file_of_torch_is_read(tmp_path, monkeypatch):
    path = str(tmp_path / "error")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{path}{TORCH_SUFFIX}")
    try:
        raise ValueError("lost: 3 files")
    except ValueError as error:
        ErrorHandler().record_exception(error)
    record = read_record(path)
    assert record is not None
    assert (record.kind, record.text.splitlines()[0]) == ("ValueError", "Traceback (most recent call last):")
    failure = WorkerFailure(1, 7, 3, 0.0, record)
    assert (failure.summary, failure.line.partition(":")[0]) == ("ValueError: lost: 3 files", "test_failures.py")


@pytest.mark.parametrize(
    ("content", "summary"),
    [
        ('{"message": "the disk is gone"}', "the disk is gone"),
        ('{"message": {"message": "IOError: gone", "extraInfo": {"timestamp": "1"}}}', "IOError: gone"),
        ('{"message": {"message": "gone", "extraInfo": {"py_callstack": "in main"}}}', "gone"),
        *(
            (bad, "exit code 3")
            for bad in ('{"message": ', "[]", "{}", '{"message": []}', '{"message": {"message": 1', "")
        ),
    ],
)
def test_error_files_of_other_handlers_are_read(tmp_path, content, summary):
    (tmp_path / f"error{TORCH_SUFFIX}").write_text(content)
    assert WorkerFailure(1, 7, 3, 0.0, read_record(str(tmp_path / "error"))).summary == summary


def test_an_exception_that_is_recorded_rings_the_alarm(tmp_path: Path):
    path, error = str(tmp_path / "error.json"), ValueError("boom")
    record_uncaught(path, error)  # no process is listening yet
    alarm = ExceptionNotice(str(tmp_path))
    try:
        bell = alarm.fileno()
        assert bell is not None and not select.select([bell], [], [], 0)[0]
        record_uncaught(path, error)
        record_uncaught(path, error)
        assert select.select([bell], [], [], 0)[0] and read_record(path) is not None
        alarm.clear()
        assert not select.select([bell], [], [], 0)[0]
    finally:
        alarm.close()
    record_uncaught("/nowhere/error.json", error)  # must not prevent the script from exiting


def test_what_is_told_between_machines_fits_into_a_message(tmp_path: Path):
    try:
        raise ValueError("x" * 3_000_000)
    except ValueError as error:
        write_record(str(tmp_path / "cause"), ValueError, error, error.__traceback__)
    cause = WorkerFailure(7, 1, 1, 0.0, read_record(str(tmp_path / "cause")))
    others = [failure(rank, time.time() + 1, "KeyError") for rank in range(1000)]
    others = [structs.replace(each, record=structs.replace(each.record, text="ü" * 5000)) for each in others]
    told = shortened([*others, cause])
    assert cause in told
    assert "characters, see the rank's output" in cause.record.text
    assert len(encode(WorkersStopped(1, 1, told))) < LARGEST
    assert shortened(()) == ()


CRASH = b"""step 3
Fatal Python error: Segmentation fault

Thread 0x00007f20d0 (most recent call first):
  File "/job/loader.py", line 3 in load

Current thread 0x00007f20d4 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/job/train.py", line 7 in <module>
  File "/job/start.py", line 1 in <module>

Extension modules: numpy (total: 1)
"""


@pytest.mark.parametrize("output", [CRASH, CRASH.replace(b"\n", b"\r\n")])
def test_a_crash_has_the_line_at_which_it_happened(output):
    line = crash_line(output)
    assert line == "train.py:7"
    told = describe(WorkerFailure(1, 7, -signal.SIGSEGV, 0.0, None, exit_line=line))
    assert "killed by SIGSEGV) at train.py:7; look at its output above" in told


def test_output_without_a_stack_has_no_line_of_a_crash():
    assert crash_line(b"step 3\n") == crash_line(CRASH.partition(b"Current")[0]) == ""
