"""Parts of the launcher that require no process."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

import pytest
from msgspec import structs

from paceline.cli.main import main, parser
from paceline.operate.launch.multinode.protocol import LARGEST, Stopped, encode
from paceline.operate.launch.workers.environment import allowed_cores, threads_per_worker, worker_environment
from paceline.operate.launch.workers.failures import (
    ExceptionNotice,
    Record,
    WorkerFailure,
    describe,
    first_failure,
    read_record,
    record_uncaught,
    shortened,
    write_record,
)
from paceline.operate.launch.workers.output import LinePrefixer, LogFile, prefix_of


def test_lines_come_out_whole_however_they_are_cut():
    shown: list[bytes] = []
    lines = LinePrefixer(b"[rank 1] ", shown.append)
    for piece in (b"on", b"e\ntwo\r\nth", b"ree\n\xff\n", b"tail"):
        lines.feed(piece)
    lines.close()
    joined = b"".join(shown)
    assert joined == b"".join(b"[rank 1] " + x + b"\n" for x in (b"one", b"two", b"three", b"\xff", b"tail"))


def test_prefixes_are_coloured_only_for_a_terminal():
    assert prefix_of(3, False) == b"[rank 3] "
    assert prefix_of(3, True).startswith(b"\x1b[")


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


def test_an_exception_that_is_recorded_rings_the_alarm(tmp_path: Path):
    path, error = str(tmp_path / "error.json"), ValueError("boom")
    record_uncaught(path, error)  # no process listens yet
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
    record_uncaught("/nowhere/error.json", error)  # the script must be left all the same


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
    assert len(encode(Stopped(1, 1, told))) < LARGEST
    assert shortened(()) == ()


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path: Path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("paceline.operate.launch.workers.output.append_to", lambda _: os.open("/dev/full", os.O_WRONLY))
    file = LogFile(tmp_path / "stdout.log", said.append)
    file.write(b"one")
    file.write(b"two")
    file.close()
    assert said == [
        f"{tmp_path}/stdout.log: No space left on device; the rest of the output is not stored there; the job continues"
    ]


def test_cores_are_shared_unless_the_user_has_chosen():
    assert threads_per_worker(8, 2, {}) == 4
    assert threads_per_worker(2, 3, {}) == 1
    assert threads_per_worker(8, 2, {"OMP_NUM_THREADS": "3"}) is None
    assert allowed_cores() >= 1


def test_workers_find_torchruns_variables():
    found = worker_environment(1, 4, 29500, "id")
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"]) == ("1", "1", "4", "4")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["TORCHELASTIC_RUN_ID"]) == ("127.0.0.1", "29500", "id")


def test_arguments_after_the_script_are_the_scripts():
    options = parser().parse_args(["run", "--nproc_per_node", "3", "--standalone", "x.py", "--epochs", "2", "-m"])
    assert (options.nproc_per_node, options.script, options.args) == (3, "x.py", ["--epochs", "2", "-m"])
    assert parser().parse_args(["run", "--nproc-per-node", "auto", "x.py"]).nproc_per_node == allowed_cores()


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_number_of_workers_that_is_none_is_refused(number, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["run", f"--nproc-per-node={number}", "x.py"])
    assert "neither a number of at least 1 nor auto" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_named(capsys):
    assert main(["run", "nowhere.py"]) == 2
    assert "nowhere.py does not exist; pass the path of a script" in capsys.readouterr().err
