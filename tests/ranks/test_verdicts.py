"""Reports about jobs that hang or fail, printed by `paceline run` and afterwards by `paceline analyze`."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from forked_launcher import ForkedLauncher, run
from launching import ENVIRONMENT, wait_until

from paceline.cli.main import main

JOB = """
import atexit, os, signal, sys, threading, time
import torch
if "plug-in" in sys.argv[1]:
    import torch.distributed as dist
else:
    import paceline as dist
from torch.utils.data import DataLoader, Dataset

class Stuck(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 4:
            time.sleep(300)
        return index

def watch(over):
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    over.append(True)

def evaluate():
    over = []
    threading.Thread(target=watch, args=(over,)).start()
    while not over:  # without a call, so that it is found here
        pass

fault = sys.argv[1]
dist.init_process_group("gloo" if "gloo" in fault else "paceline")
rank = dist.get_rank()
a, b = torch.ones(4096), torch.ones(128)
if "deadlock" in fault:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if rank else reversed(groups):
        dist.all_reduce(a, group=group)
for step in range(20):
    if step == 10 and rank == 1:
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "leave":
            os._exit(0)
        if fault == "exit":
            sys.exit(0)
        if fault == "loader":
            for _ in DataLoader(Stuck(), batch_size=2, num_workers=1, multiprocessing_context="fork"):
                pass
        if fault == "busy":
            evaluate()
        if fault == "linger":
            atexit.register(time.sleep, 60)
        if fault in ("raise", "linger"):
            raise ValueError("bad sample")
        if fault == "shape":
            a = torch.ones(77)
    dist.all_reduce(a)
    dist.broadcast(b, 0)
    dist.barrier()
while fault == "busy":  # until the launcher has said that the job continues
    dist.barrier()
    time.sleep(0.05)
"""
BACKWARD_IN_JOIN = """
import time
import torch
import torch.distributed as dist
from torch import nn
import paceline.interop.torch_backend

paceline.interop.torch_backend.register()
dist.init_process_group("paceline")
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
with model.join(divide_by_initial_world_size=False):
    loss = model(torch.ones(2, 3)).sum() if dist.get_rank() == 0 else time.sleep(300)
    loss.backward()
"""
KEY = """
import time
import FACE as dist
from torch.distributed.distributed_c10d import _get_default_store
from paceline.comm.group.default import default_world
dist.init_process_group("paceline")
dist.barrier()
store = _get_default_store() if "FACE" == "torch.distributed" else default_world().store
store.get("ready") if dist.get_rank() == 1 else time.sleep(300)
"""
NO_INIT = """
import os, time
import paceline as dist
os.environ["RANK"] == "1" and time.sleep(300)
dist.init_process_group("paceline")
"""
ABANDONED = """
import os, time
import torch
import paceline as dist
dist.init_process_group("paceline")
for step in range(20):
    if step == 10 and dist.get_rank() == 0:
        time.sleep(0.5)  # the call of rank 1 cannot complete before that rank exits
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if step == 10 and dist.get_rank() == 1:
        os._exit(0)
    work.wait()
"""
NO_SYNC = """
import contextlib
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("paceline")
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
for step in range(12):
    with model.no_sync() if dist.get_rank() == 1 and step == 5 else contextlib.nullcontext():
        model(torch.ones(2, 3)).sum().backward()
"""
FLAGS = ("--nproc-per-node=2", "--no-pin", "--stall-after=1.5", "--shutdown-timeout=1")
WAITS = "rank 0 waits in all_reduce(float32, 4096) call 32 (script.py:"


@pytest.fixture
def said(script, tmp_path):
    """Runs the job with a fault; returns the launcher's output once it contains `word` or the job has ended.

    A rank that is "busy" computes until the launcher prints `until`.
    """

    def start(fault: str, word: str | None = None, until: str = "", job: str = JOB) -> str:
        over = tmp_path / "over"
        compat = ("--compat=torch",) if "plug-in instead of" in fault else ()
        flags = (*FLAGS, *compat, "--log-dir", str(tmp_path / "runs"), "--rdzv-id=job")
        launcher = ForkedLauncher(
            ["run", *flags, script(job), fault, str(over)], ENVIRONMENT, tmp_path / "printed", tmp_path / "said"
        )
        with open(tmp_path / "said") as output:
            try:
                if until:
                    wait_until(lambda: launcher.poll() is not None or until in text(output))
                    over.touch()
                wait_until(lambda: launcher.poll() is not None or (word or "\0") in text(output))
            finally:
                launcher.terminate()
                launcher.wait(60)
            return text(output)

    return start


def text(output) -> str:
    return os.pread(output.fileno(), 1 << 20, 0).decode()


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("stop", "rank 1 has not reached this call: it is stopped by a signal"),
        ("loader", "rank 1 has not reached this call: it is in DataLoader.__next__ (script.py:"),
    ],
)
def test_a_hang_is_explained_live_and_afterwards(said, tmp_path, capsys, fault, sentence):
    assert WAITS in said(fault, sentence)  # on a busy machine, an earlier call of rank 1 may be reported first
    assert main(["analyze", str(tmp_path / "runs" / "job")]) == 1
    assert sentence in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "groups"),
    [
        ("deadlock", ["(no. 2 of 2)", "(no. 1 of 2)"]),
        ("deadlock of gloo", ["(no. 2 of 2)", "(no. 1 of 2)"]),
        ("deadlock of plug-in", ["group 2", "group 1"]),
        ("deadlock of plug-in instead of gloo", ["group 2", "group 1"]),
    ],
)
def test_two_groups_that_wait_for_each_other_are_named(said, fault, groups):
    told = said(fault, "deadlock: ")
    assert "deadlock: rank 0 waits in all_reduce(float32, 4096) call 2 of the group" in told
    assert all(group in told for group in groups)


@pytest.mark.parametrize("face", ["paceline", "torch.distributed"])
def test_a_wait_for_a_key_is_told_with_the_key(said, face):
    told = said("sleep", "for the key 'ready'", job=KEY.replace("FACE", face))
    assert "rank 1 waits in store.get (script.py:9) for the key 'ready', which no rank has set, for " in told
    assert "rank 0 is at script.py:9" in told


def test_a_rank_that_has_not_called_init_is_named(said):
    told = said("sleep", "init_process_group()", job=NO_INIT)
    assert "rank 0 waits in init_process_group() (script.py:5); rank 1 has not reached this call: it is at" in told


def test_an_exit_during_an_async_call_is_the_headline(said):
    told = said("leave", job=ABANDONED)
    assert "rank 1 exited too early, with exit code 0 before all_reduce(float32, 1)" in told


def test_an_early_exit_has_its_line_live_and_afterwards(said, tmp_path, capsys):
    line = "rank 1 exited too early, with exit code 0 (sys.exit or SystemExit at script.py:"
    assert line in said("exit")
    assert main(["analyze", str(tmp_path / "runs" / "job")]) == 1
    assert line in capsys.readouterr().out


def test_an_early_exit_is_told_if_torch_wraps_the_error(said):
    told = said("leave", job=NO_SYNC)
    assert "rank 1 exited too early, with exit code 0 after all_reduce(float32, 4) call " in told
    assert "PeerLostError: rank 1 (" in told and " left the group" in told and "failed first" not in told


def test_a_backward_of_torchs_that_waits_in_join_is_explained(said):
    told = said("sleep", "rank 1 has not reached this call", job=BACKWARD_IN_JOIN)
    assert "rank 0 waits in all_reduce(float32, 1) call " in told
    assert "rank 1 has not reached this call: it is at script.py:" in told


def test_a_rank_that_works_is_no_error_and_its_return_is_told(said):
    told = said("busy", "the job continues", until="This is not an error if it evaluates, saves or compiles")
    assert "rank 1 has not reached this call: it is in evaluate (script.py:" in told
    assert "This is not an error if it evaluates, saves or compiles" in told
    assert "the job continues after " in told


def require_cause(directory, capsys, cause: str) -> None:
    for missing in (None, "0"):
        if missing is not None:
            (directory / "attempt_0" / missing / "recording.record").unlink()
        main(["analyze", "--json", str(directory)])
        found = json.loads(capsys.readouterr().out)
        assert missing or [each["cause"] for each in found["verdicts"]] == [cause]
        assert (found["ranks"], found["world_size"]) == (1 if missing else 2, 2)


def require_told_once(told: str, sentence: str) -> None:
    """The cause is in the last line. If a job takes a long time to end, the last line refers to an earlier one."""
    assert told.count(sentence) == 1
    last = told.splitlines()[-1]
    assert sentence in last or ("the cause was explained above" in last and "(rank 1)" in last)


def test_calls_that_do_not_fit_are_told_last(said, tmp_path, capsys):
    require_told_once(said("shape"), "rank 1 called all_reduce(float32, 77) as call 32")
    require_cause(tmp_path / "runs" / "job", capsys, "OTHER_SHAPE")


def test_an_exception_is_told_last_and_a_signals_is_none(said, tmp_path, capsys):
    require_told_once(said("raise"), "rank 1 failed: ValueError: bad sample (script.py:")
    directory = tmp_path / "runs" / "job"
    shutil.copytree(directory, tmp_path / "copy")
    require_cause(tmp_path / "copy", capsys, "EXCEPTION")
    for told in directory.rglob("error.json"):
        told.unlink()  # only the ranks' observations of each other remain
    facts = json.loads((directory / "job.json").read_text())
    causes = {}
    for state in ("failed", "stopped"):
        (directory / "job.json").write_text(json.dumps({**facts, "state": state}))
        main(["analyze", "--json", str(directory)])
        causes[state] = [each["cause"] for each in json.loads(capsys.readouterr().out)["verdicts"]]
    assert causes["failed"] == ["LEFT"], "rank 1 had ended, and rank 0 missed it"
    assert causes["stopped"] != causes["failed"], "its end says nothing"


def test_a_rank_that_leaves_early_is_the_headline(said):
    told = said("leave")
    require_told_once(told, "rank 1 exited too early, with exit code 0 after barrier() call 31 (script.py:")
    assert "rank 0 failed because of another rank (" in told and "failed first" not in told
    assert told.index("rank 1 exited too early") < told.index("rank 0 failed because of another rank (")


def test_an_exception_is_told_before_its_process_ends(said):
    told = said("linger", "rank 1 failed: ValueError: bad sample (script.py:")  # it exits after a minute
    assert "rank 1 failed first (" not in told, "which is said at the end"


def test_a_good_job_ends_without_a_word(script, tmp_path, capsys):
    done = run(*FLAGS, "--log-dir", str(tmp_path), "--rdzv-id=job", script(JOB), "none")
    assert done.returncode == 0
    assert "rank" not in done.stderr
    assert main(["analyze", str(tmp_path / "job")]) == 0
    assert "no problem was found" in capsys.readouterr().out


def test_a_directory_without_recordings_is_refused(tmp_path, capsys):
    assert main(["analyze", str(tmp_path)]) == 2
    assert "contains no recording" in capsys.readouterr().err
