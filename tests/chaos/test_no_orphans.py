"""Whatever ends the launcher, nothing that it started stays behind: no worker, no worker's child, no directory."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launching import ENVIRONMENT, command, is_alive, kill, processes_with, run, wait_until

from paceline.launch.cgroup import Cgroup

# A worker that deserves no trust: it ignores what it can and starts children, one of them in a session of its own.
STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if "ignore" in sys.argv:
        signal.signal(number, signal.SIG_IGN)
for apart in (False, True):
    subprocess.Popen(["sleep", "300"], start_new_session=apart)
mark = "PACELINE_TEST_MARK=" + os.environ["PACELINE_TEST_MARK"]
subprocess.Popen(["env", "-i", mark, "sleep", "300"])
open(sys.argv[1] + os.environ["RANK"], "w").close()
time.sleep(300)
"""
KILLS = 100
WORKERS = 2


class Started:
    """A launcher whose processes can be found again by a mark of the test's own."""

    def __init__(self, directory: Path, *flags: str, words: str = "", terminal: int | None = None) -> None:
        self.mark = f"PACELINE_TEST_MARK={secrets.token_hex(8)}"
        self.base = directory / secrets.token_hex(4)
        script = Path(f"{self.base}-stubborn.py")  # its own: a job may start while another one reads its script
        script.write_text(STUBBORN)
        arguments = command(f"--nproc-per-node={WORKERS}", *flags, str(script), str(self.base), words)
        name, value = self.mark.split("=")
        self.scratch = directory / f"tmp-{secrets.token_hex(4)}"
        self.scratch.mkdir()
        environment = {**ENVIRONMENT, name: value, "TMPDIR": str(self.scratch)}
        streams = subprocess.DEVNULL if terminal is None else terminal
        self.process = subprocess.Popen(
            arguments, stdin=streams, stdout=streams, stderr=streams, env=environment, start_new_session=True
        )

    @property
    def is_up(self) -> bool:
        return all(Path(f"{self.base}{rank}").exists() for rank in range(WORKERS))

    def wait_until_up(self) -> None:
        wait_until(lambda: self.is_up)

    def left(self) -> list[int]:
        return [pid for pid in processes_with(self.mark) if pid != self.process.pid]

    def expect_nothing_left(self, timeout_s: float = 10) -> None:
        wait_until(lambda: not self.left(), timeout_s)
        wait_until(lambda: not any(self.scratch.iterdir()), 2)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.left(), 5)  # the guards do it, and remove the job's directory and cgroup
        kill(self.left())
        self.process.wait()


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
    assert len(job.left()) >= 4 * WORKERS
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
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_workers_that_ignore_a_signal_are_killed_after_a_while(start):
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    jobs = [start("--shutdown-timeout=0.5", words="ignore") for _ in numbers]
    begun_s = time.monotonic()
    for job, number in zip(jobs, numbers, strict=True):
        job.process.send_signal(number)
    for job in jobs:
        assert job.process.wait(20) == 1
        assert 0.4 < time.monotonic() - begun_s < 5
        job.expect_nothing_left()


def test_a_second_ctrl_c_kills_now(start):
    job = start("--shutdown-timeout=60", words="ignore")
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(5) == 1
    job.expect_nothing_left()


def test_a_second_ctrl_c_is_gentle_on_those_that_hear_the_first(start):
    job = start()
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(5) == 1
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
        os.close(os.open(os.ttyname(0), os.O_RDWR))  # the first one that a session's leader opens becomes its own

    shell = subprocess.Popen(
        ["sh", "-c", f"{words}; true"], stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal,
        env={**ENVIRONMENT, name: value},
    )  # fmt: skip
    os.close(theirs)
    try:
        wait_until(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(2)))
        shell.kill()
        shell.wait(5)
        wait_until(lambda: not processes_with(mark), 15)
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
loader = iter(DataLoader(list(range(10**6)), num_workers=2))
next(loader)
open(sys.argv[1] + os.environ["RANK"], "w").close()
for _ in loader: time.sleep(0.01)
"""


def test_the_children_of_a_data_loader_end_too(tmp_path):
    script = tmp_path / "loader.py"
    script.write_text(LOADER)
    mark = f"PACELINE_TEST_MARK={secrets.token_hex(8)}"
    name, value = mark.split("=")
    launcher = subprocess.Popen(
        command(str(script), str(tmp_path / "up")), env={**ENVIRONMENT, name: value}, stderr=subprocess.DEVNULL
    )
    try:
        wait_until((tmp_path / "up0").exists, 30)
        assert len(processes_with(mark)) >= 4
        launcher.kill()
        wait_until(lambda: not processes_with(mark), 10)
    finally:
        launcher.kill()
        kill(processes_with(mark))
        launcher.wait()


# A child that has cut every tie: its parent has ended, it leads a session, and its environment is empty.
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


# `paceline run` on a machine that lets nobody make a cgroup.
WITHOUT_CGROUPS = """
import sys
from paceline.cli.main import main
from paceline.launch.cgroup import Cgroup
Cgroup.make = lambda cgroup: False
sys.exit(main(["run", *sys.argv[1:]]))
"""


@pytest.fixture
def with_daemon(tmp_path):
    """Runs a job whose worker starts a daemon; the launcher and the daemon's process id."""
    script, up = tmp_path / "daemon.py", tmp_path / "up"
    script.write_text(DAEMON)
    launchers = []

    def begin(*words: str, launcher: Sequence[str] = command()) -> tuple[subprocess.Popen[bytes], int]:
        launchers.append(subprocess.Popen([*launcher, str(script), str(up), *words], env=ENVIRONMENT))
        wait_until(up.exists, 30)
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
    assert launcher.wait(20) == 0
    assert not is_alive(daemon)


def test_a_daemon_of_a_worker_ends_with_an_interrupted_job(with_daemon):
    launcher, daemon = with_daemon("stay")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(20) == 1
    assert not is_alive(daemon)


@pytest.fixture
def delegated():
    """The cgroup below which jobs can have their own; skips where none can be made."""
    probe = Cgroup.planned()
    if probe is None or not probe.make():
        pytest.skip("this user cannot make a cgroup of version 2 here")
    probe.remove()
    return probe.directory.parent


def _cgroup_in(delegated: Path, text: str) -> Path:
    """The cgroup of version 2 that /proc/PID/cgroup names; other jobs may have theirs beside it."""
    (name,) = (Path(line).name for line in text.splitlines() if "0::" in line)
    assert name.startswith("paceline-"), text
    return delegated / name


def test_a_daemon_of_a_worker_ends_with_a_killed_launcher(with_daemon, delegated):
    launcher, daemon = with_daemon("stay")
    made = _cgroup_in(delegated, Path(f"/proc/{daemon}/cgroup").read_text())
    assert made.exists()
    launcher.kill()
    wait_until(lambda: not is_alive(daemon), 10)
    wait_until(lambda: not made.exists(), 10)


def test_a_job_leaves_no_cgroup(delegated, tmp_path):
    script = tmp_path / "cgroup.py"
    script.write_text("print(open('/proc/self/cgroup').read())")
    done = run(str(script))
    assert done.returncode == 0, done.stderr
    assert not _cgroup_in(delegated, done.stdout).exists()


def _ordeal(number: int, directory: Path) -> str | None:
    """One job, ended at a random instant in a random way; what was left of it, in words.

    One job of every four is up by then, however slow the machine is: a launcher that is killed before it has started
    anything shows little.
    """
    chance = random.Random(number)
    words = chance.choice(["", "ignore"])
    flags = (f"--max-restarts={chance.choice([0, 0, 5])}", f"--start-method={chance.choice(['spawn', 'forkserver'])}")
    job = Started(directory, "--shutdown-timeout=0.2", *flags, words=words)
    try:
        if number % 4 == 0:
            wait_until(lambda: job.is_up, 60)
        time.sleep(chance.uniform(0.0, 0.1 if number % 4 == 0 else 0.6))
        for _ in range(chance.choice([1, 1, 2, 3])):
            mine = [job.process.pid, *job.left()]
            victim = chance.choice([job.process.pid, chance.choice(mine)])
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
            time.sleep(chance.uniform(0.0, 0.05))
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.process.pid, chance.choice([signal.SIGKILL, signal.SIGTERM]))
        try:
            job.process.wait(15)
        except subprocess.TimeoutExpired:
            return f"ordeal {number}: the launcher runs on"
        deadline = time.monotonic() + 5
        while job.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        told = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[-100:] for pid in job.left()]
        return f"ordeal {number}: left are {told}" if told else None
    finally:
        job.close()


@pytest.mark.timeout(180)
def test_a_hundred_random_kills_leave_nothing(tmp_path):
    with ThreadPoolExecutor(3) as threads:
        left = [each for each in threads.map(lambda number: _ordeal(number, tmp_path), range(KILLS)) if each]
    assert not left
