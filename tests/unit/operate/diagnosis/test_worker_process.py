"""The location of a program according to faulthandler, and its state according to /proc."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launching import wait_until

import paceline
from paceline import errors
from paceline.operate.diagnosis import worker_process
from paceline.operate.diagnosis.job_snapshot import Frame, ProcessState
from paceline.operate.launch import failures
from paceline.operate.launch.workers import bootstrap

_SITE = "/usr/lib/python3/dist-packages"

_LOADER = f"""Stack (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/queue.py", line 180 in get
  File "{_SITE}/torch/utils/data/dataloader.py", line 1295 in _try_get_data
  File "{_SITE}/torch/utils/data/dataloader.py", line 733 in __next__
  File "/home/me/train.py", line 71 in main
  File "/home/me/train.py", line 90 in <module>
  File "{_SITE}/paceline/operate/launch/workers/bootstrap.py", line 71 in run
  File "{_SITE}/paceline/operate/launch/workers/bootstrap.py", line 171 in <module>
"""

_CALL = f"""Stack (most recent call first):
  File "{_SITE}/paceline/comm/group/process_group.py", line 48 in all_reduce
  File "/home/me/train.py", line 88 in step
  File "/home/me/train.py", line 90 in <module>
"""

_DATASET = f"""Stack (most recent call first):
  File "/home/me/data.py", line 12 in __getitem__
  File "{_SITE}/torch/utils/data/_utils/fetch.py", line 54 in fetch
  File "{_SITE}/torch/utils/data/dataloader.py", line 733 in __next__
  File "/home/me/train.py", line 71 in <module>
"""

_SEND = f"""Stack (most recent call first):
  File "{_SITE}/torch/distributed/distributed_c10d.py", line 2 in send
  File "{_SITE}/torch/distributed/c10d_logger.py", line 3 in wrapper
  File "/home/me/train.py", line 8 in <module>
"""

_WAIT = f"""Stack (most recent call first):
  File "{_SITE}/paceline/interop/torch_backend/patches.py", line 2 in call
  File "/home/me/train.py", line 7 in <module>
"""

_SAVE = """Stack (most recent call first):
  File "/opt/venv/lib/python3.12/site-packages/torch/serialization.py", line 900 in save
  File "/home/me/train.py", line 5 in <module>
"""

_USER = """Stack (most recent call first):
  File "/home/me/train.py", line 5 in <module>
"""


@pytest.mark.parametrize(
    ("text", "told", "is_loader", "is_call"),
    [
        (_LOADER, "in DataLoader.__next__ (train.py:71)", True, False),
        (_CALL, "in process_group.all_reduce (train.py:88)", False, True),
        (_DATASET, "in __getitem__ (data.py:12)", True, False),
        (_SAVE, "in serialization.save (train.py:5)", False, False),
        (_USER, "at train.py:5", False, False),
        (_SEND, "in distributed_c10d.send (train.py:8)", False, True),
        (_WAIT, "at train.py:7", False, False),
    ],
)
def test_the_users_line_is_named(text, told, is_loader, is_call):
    place = worker_process.place_of(worker_process.parse(text))
    assert (str(place), place.is_loader, place.is_call) == (told, is_loader, is_call)
    assert worker_process.is_whole(text)
    assert not worker_process.is_whole(text[:-20])


_ROOTS = {"paceline": Path(paceline.__file__).parents[1], "torch": Path(torch.__file__).parents[1]}


@pytest.mark.parametrize(
    "path",
    sorted(
        {
            *errors.STARTERS,
            *worker_process._LOADERS,
            *worker_process._CALLS,
            *worker_process._COMPILERS,
            *worker_process._WRAPPERS,
            *failures._OWN_FILES,
        }
        - {
            "<frozen importlib",
            "/contextlib.py",
            "runpy.py",
            "<frozen runpy>",
            "triton/compiler/",
            "triton/runtime/",
        }  # Python's own, and those not installed with PyTorch for CPUs
    ),
)
def test_the_files_by_which_frames_are_recognized_exist(path):
    found = _ROOTS[path.partition("/")[0]] / path
    assert found.is_dir() if path.endswith("/") else found.is_file(), f"{path} was moved; stacks show our own frames"


def test_an_empty_stack_says_nothing():
    assert worker_process.place_of(worker_process.parse("")) is None
    assert not worker_process.is_whole("")


_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from bootstrap import offer_stack
offer_stack()
import ctypes, threading, time
def in_native_code():
    ctypes.PyDLL(None).sleep(300)  # holds the interpreter's lock
def in_a_thread():
    time.sleep(300)
if sys.argv[2] == "native":
    print(flush=True)
    in_native_code()
def in_the_main_thread():
    thread.join()
target, *args = (in_a_thread,) if sys.argv[2] == "thread" else (time.sleep, 300)
thread = threading.Thread(target=target, args=args, daemon=True)
thread.start()
print(flush=True)
in_the_main_thread()
"""


@pytest.fixture
def program(tmp_path):
    """Starts a program that provides its stack and then blocks at the location given by its argument."""
    started = []
    script = tmp_path / "train.py"
    script.write_text(_PROGRAM)

    def start(where):
        directory = os.path.dirname(bootstrap.__file__)
        process = subprocess.Popen([sys.executable, str(script), directory, where], stdout=subprocess.PIPE)
        started.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("where", "function"),
    [("native", "in_native_code"), ("thread", "in_a_thread"), ("thread without own code", "in_the_main_thread")],
)
def test_a_stack_is_taken_without_the_programs_help(program, where, function):
    process = program(where)
    wait_until(lambda: function in [frame.function for frame in worker_process.capture_stack(process.pid)])
    assert process.poll() is None


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_a_stack_is_taken_without_process_descriptors_too(program, monkeypatch, refusal):
    def refuse(pid: int) -> int:
        raise OSError(refusal, "refused")

    monkeypatch.setattr(worker_process, "pidfd_open", refuse)
    process = program("native")
    wait_until(lambda: "in_native_code" in [frame.function for frame in worker_process.capture_stack(process.pid)])
    assert process.poll() is None


def test_one_that_cannot_answer_does_not_hide_the_others_stacks(program):
    started, answering = program("native"), program("thread")
    started.send_signal(signal.SIGSTOP)
    asked = [2**30, started.pid, answering.pid]
    wait_until(lambda: worker_process.capture_stacks(asked, 0.2).keys() == {answering.pid})
    started.send_signal(signal.SIGCONT)


def test_a_process_without_the_handler_gets_no_signal():
    with subprocess.Popen(["sleep", "300"]) as process:
        assert worker_process.capture_stack(process.pid) == ()
        time.sleep(0.05)
        assert process.poll() is None
        process.kill()


def test_a_stopped_process_is_seen_and_one_that_has_ended_too():
    with subprocess.Popen(["sleep", "300"]) as process:
        first = worker_process.sample(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert worker_process.between(first, worker_process.sample(process.pid)).state is ProcessState.STOPPED
        process.kill()
    assert worker_process.between(first, worker_process.sample(process.pid)).state is ProcessState.ENDED


def test_the_work_of_children_counts():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:

        def a_child_is_busy() -> bool:
            first = worker_process.sample(process.pid)
            time.sleep(0.3)
            is_busy = worker_process.between(first, worker_process.sample(process.pid)).is_busy
            return is_busy and bool(worker_process._descendants(Path("/proc"), process.pid))

        wait_until(a_child_is_busy)
        os.killpg(process.pid, signal.SIGKILL)


def test_short_processes_that_come_and_go_are_work():
    code = "import subprocess\nwhile True: subprocess.run(['sleep', '0.02'])"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:

        def child() -> str:
            first = worker_process.sample(process.pid)
            time.sleep(0.1)
            return worker_process.between(first, worker_process.sample(process.pid)).child

        wait_until(lambda: child() == "sleep")
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="the numbers of system calls are not known")
def test_a_process_that_waits_for_input_is_seen():
    program = [sys.executable, "-c", "input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as process:

        def reads_stdin() -> bool:
            taken = worker_process.sample(process.pid)
            return worker_process.between(taken, taken).reads_stdin

        wait_until(reads_stdin)
        process.stdin.write(b"\n")
    with subprocess.Popen(["sleep", "300"], stdin=subprocess.PIPE) as process:
        assert not worker_process.sample(process.pid).reads_stdin
        process.kill()


def _sample(at_s, threads):
    return worker_process.ProcessSample(at_s, "S", 0.0, 0, 0, 0, threads, frozenset(), 0, False)


def test_only_threads_that_compute_are_said_to_wait_for_a_core():
    first = _sample(0.0, {1: (0, 0), 2: (0, 0)})
    looks_for_news = worker_process.between(first, _sample(1.0, {1: (1_000_000, 400_000_000), 2: (0, 0)}))
    assert looks_for_news.waited_share == 0.0 and not looks_for_news.is_busy
    computes = worker_process.between(first, _sample(1.0, {1: (0, 0), 2: (100_000_000, 900_000_000)}))
    assert computes.waited_share == pytest.approx(0.9) and computes.is_busy


def test_a_child_that_gets_hardly_any_core_waits_for_one():
    first = replace(_sample(0.0, {1: (7, 0), 2: (9, 0)}), runnable=frozenset({2}))
    last = replace(_sample(1.0, {1: (7, 0), 2: (5_000_000, 0)}), runnable=frozenset({2}))
    starved = worker_process.between(first, last)
    assert starved.waited_share == pytest.approx(1.0) and starved.is_busy
    sleeps = worker_process.between(first, replace(last, runnable=frozenset()))
    assert sleeps.waited_share == 0.0 and not sleeps.is_busy


@pytest.mark.parametrize(
    ("file", "activity"),
    [
        (f"{_SITE}/torch/_dynamo/eval_frame.py", "compiles"),
        ("/usr/lib/python3.11/subprocess.py", "waits for a child process"),
        ("/usr/lib/python3.11/socket.py", "uses the network"),
        ("/usr/lib/python3.11/queue.py", ""),
    ],
)
def test_the_activity_follows_from_the_library(file, activity):
    frames = [Frame(file, 1, "run"), Frame("/home/me/train.py", 7, "main")]
    assert worker_process.place_of(frames).activity == activity


def test_a_library_in_an_unusual_directory_is_not_the_users():
    frames = [Frame("/opt/libraries/torch/utils/data/dataloader.py", 1, "__next__"), Frame("/me/train.py", 7, "main")]
    place = worker_process.place_of(frames)
    assert (place.what, place.line) == ("DataLoader.__next__", "train.py:7")
