"""However the launcher exits, nothing that it started remains: no worker, no child process, no directory."""

from __future__ import annotations

import contextlib
import os
import pty
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from forked_launcher import ForkedLauncher
from launching import ENVIRONMENT, command, is_alive, kill, processes_in, processes_with, run, wait_until
from stubborn import STUBBORN, WORKERS, Started

from paceline.operate.launch.workers.cleanup import Cgroup


@pytest.fixture
def start(tmp_path):
    started: list[Started] = []

    def begin(*flags: str, words: str = "") -> Started:
        started.append(Started(tmp_path, *flags, words=words))
        started[-1].wait_until_up()
        return started[-1]

    yield begin
    for each in started:
        each.close()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_launcher_is_killed(start, method):
    job = start(f"--start-method={method}", words="ignore")
    wait_until(lambda: len(job.left()) >= 4 * WORKERS)
    job.process.kill()
    job.expect_nothing_left()


def test_the_launchers_whole_process_group_is_killed(start):
    job = start(words="ignore")
    os.killpg(job.process.pid, signal.SIGKILL)
    job.expect_nothing_left()


def test_a_guard_is_killed_before_the_launcher(start):
    job = start()
    launchers = [pid for pid in job.left() if b"stubborn.py" in _command(pid) and b"bootstrap.py" not in _command(pid)]
    os.kill(launchers[0], signal.SIGKILL)
    job.process.kill()
    job.expect_nothing_left()


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):  # the process has exited in the meantime
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_workers_that_ignore_a_signal_are_killed_after_a_while(start):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    jobs = [start("--shutdown-timeout=0.5", words="ignore") for _ in numbers]
    begun_s = time.monotonic()
    for job, number in zip(jobs, numbers, strict=True):
        job.process.send_signal(number)
    for job in jobs:
        assert job.process.wait(20) == 1  # well under the 30 s that workers are given without the flag
        assert time.monotonic() - begun_s > 0.4
        job.expect_nothing_left()


def test_a_second_ctrl_c_kills_now(start):
    job = start("--shutdown-timeout=60", words="ignore")
    job.process.send_signal(signal.SIGINT)
    job.wait_to_hear("SIGINT: passed on to 2 workers")
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(30) == 1
    job.expect_nothing_left()


def test_a_second_ctrl_c_is_gentle_on_those_that_hear_the_first(start):
    job = start()
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(20) == 1
    job.expect_nothing_left()


def test_the_shell_of_a_terminal_is_killed(tmp_path):
    ours, theirs = pty.openpty()
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    mark = f"PACELINE_TEST_MARK={secrets.token_hex(8)}"
    words = " ".join(command("--nproc-per-node=2", "--shutdown-timeout=1", str(script), str(tmp_path / "up")))
    name, value = mark.split("=")

    def take_terminal() -> None:
        os.setsid()
        os.close(os.open(os.ttyname(0), os.O_RDWR))  # this makes it the session's controlling terminal

    shell = subprocess.Popen(
        ["sh", "-c", f"{words}; true"], stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal,
        env={**ENVIRONMENT, name: value},
    )  # fmt: skip
    os.close(theirs)
    try:
        wait_until(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(2)))
        shell.kill()
        shell.wait(60)
        wait_until(lambda: not processes_with(mark))
    finally:
        os.close(ours)
        shell.kill()
        kill(processes_with(mark))
        shell.wait()


def test_nohup_keeps_a_job_alive(tmp_path):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = Started(tmp_path)
    finally:
        signal.signal(signal.SIGHUP, previous)
    try:
        job.wait_until_up()
        job.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert job.process.poll() is None
    finally:
        job.close()


LOADER = """
import os, sys, time
from torch.utils.data import DataLoader
if __name__ == "__main__":
    loader = iter(DataLoader(list(range(10**6)), num_workers=2))
    next(loader)
    open(sys.argv[1] + os.environ["RANK"], "w").close()
    for _ in loader: time.sleep(0.01)
"""


def test_the_children_of_a_data_loader_end_too(tmp_path):
    script = tmp_path / "loader.py"
    script.write_text(LOADER)
    words = ["run", str(script), str(tmp_path / "up")]
    launcher = ForkedLauncher(words, ENVIRONMENT, tmp_path / "out", tmp_path / "err", cwd=str(tmp_path))
    try:
        wait_until((tmp_path / "up0").exists)
        assert len(processes_in(tmp_path)) >= 4
        launcher.kill()
        wait_until(lambda: not processes_in(tmp_path))
    finally:
        launcher.kill()
        kill(processes_in(tmp_path))
        launcher.wait()


# A daemon without any connection to its worker: its parent has exited, it leads a session, and its environment is
# empty.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1] + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        os.execve("/bin/sleep", ["sleep", "300"], {})
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
time.sleep(300 if "stay" in sys.argv else 0)
"""


# `paceline run`, as on a machine where cgroups cannot be created.
WITHOUT_CGROUPS = """
import sys
from paceline.cli.main import main
from paceline.operate.launch.workers.cleanup import Cgroup
Cgroup.make = lambda cgroup: False
sys.exit(main(["run", *sys.argv[1:]]))
"""


@pytest.fixture
def with_daemon(tmp_path):
    """Runs a job whose worker starts a daemon; returns the launcher and the daemon's process id."""
    script, up = tmp_path / "daemon.py", tmp_path / "up"
    script.write_text(DAEMON)
    launchers = []

    def begin(*words: str, launcher: Sequence[str] = command()) -> tuple[subprocess.Popen[bytes], int]:
        launchers.append(subprocess.Popen([*launcher, str(script), str(up), *words], env=ENVIRONMENT))
        wait_until(up.exists)
        return launchers[0], int(up.read_text())

    yield begin
    for launcher in launchers:
        launcher.kill()
        launcher.wait()
    if up.exists() and is_alive(int(up.read_text())):
        os.kill(int(up.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("launcher", [command(), [sys.executable, "-c", WITHOUT_CGROUPS]], ids=["", "no cgroups"])
def test_a_daemon_of_a_worker_ends_with_the_job(with_daemon, launcher):
    launcher, daemon = with_daemon(launcher=launcher)
    assert launcher.wait(60) == 0
    wait_until(lambda: not is_alive(daemon))


def test_a_daemon_of_a_worker_ends_with_an_interrupted_job(with_daemon):
    launcher, daemon = with_daemon("stay")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60) == 1
    wait_until(lambda: not is_alive(daemon))


@pytest.fixture
def delegated():
    """Returns the cgroup in which jobs can create their own cgroups; skips the test if this is not possible."""
    probe = Cgroup.planned()
    if probe is None or not probe.make():
        pytest.skip("this user cannot make a cgroup of version 2 here")
    probe.remove()
    return probe.directory.parent


def _cgroup_in(delegated: Path, text: str) -> Path:
    """Returns the directory of the cgroup in `text`, the contents of a /proc/PID/cgroup."""
    (name,) = (Path(line).name for line in text.splitlines() if "0::" in line)
    assert name.startswith("paceline-"), text
    return delegated / name


def test_a_daemon_of_a_worker_ends_with_a_killed_launcher(with_daemon, delegated):
    launcher, daemon = with_daemon("stay")
    made = _cgroup_in(delegated, Path(f"/proc/{daemon}/cgroup").read_text())
    assert made.exists()
    launcher.kill()
    wait_until(lambda: not is_alive(daemon))
    wait_until(lambda: not made.exists())


def test_a_job_leaves_no_cgroup(delegated, tmp_path):
    script = tmp_path / "cgroup.py"
    script.write_text("print(open('/proc/self/cgroup').read())")
    done = run(str(script))
    assert done.returncode == 0, done.stderr
    made = _cgroup_in(delegated, done.stdout)
    wait_until(lambda: not made.exists())
