"""Runs the faulty program under `paceline run`, on one host or two, and under torchrun with torch's flight recorder."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hosts.machines import Machines
from hosts.network import ipv4
from launching import ENVIRONMENT, command

from verdict_cases import program

PROGRAM = str(Path(program.__file__).resolve())
LIMIT_S = 120.0
_MEMORY = Path("/sys/fs/cgroup/memory")
_SLOW_RATE = "100mbit"
_EVERY_S = 0.01  # interval at which output and memory are checked; the resolution of the times


@dataclass(frozen=True)
class Said:
    """The output of a job, and the seconds from the fault until `is_enough` accepted the output, or None."""

    text: str
    after_s: float | None


def paceline(fault: str, ranks: int, hosts: int, stall_after_s: float, is_enough: Callable[[str], bool]) -> Said:
    """Runs the program until it exits, or until `is_enough` accepts its output."""
    flags = ["--no-pin", f"--stall-after={stall_after_s}", "--shutdown-timeout=1"]
    with tempfile.TemporaryDirectory(prefix="paceline-verdict-") as name:
        words = [*flags, "--log-dir", name, "--rdzv-id=job", PROGRAM, "paceline", fault, name]
        if hosts > 1:
            with Machines(hosts, rate=_SLOW_RATE if fault == "slow_link" else None) as machines:
                address = ("--nnodes", str(hosts), "--master-addr", ipv4(0), "--master-port", "29400")
                launchers = [
                    machines.start(
                        host, f"--nproc-per-node={(ranks + host) // hosts}", *address, f"--node-rank={host}", *words
                    )
                    for host in range(hosts)
                ]
                return _wait(launchers, lambda: machines.said(launchers[0]), Path(name), is_enough)
        with _room(fault) as room, open(Path(name, "said"), "w") as output:
            enter = f"echo $$ > {room}/cgroup.procs;" if room is not None else ""
            shell = ["sh", "-c", f'{enter} exec "$@"', "sh", *command(f"--nproc-per-node={ranks}", *words)]
            launcher = subprocess.Popen(shell, stdout=output, stderr=output, text=True, env=ENVIRONMENT)
            return _wait([launcher], lambda: Path(name, "said").read_text(), Path(name), is_enough, room)


def _wait(
    launchers: list[subprocess.Popen[str]],
    said: Callable[[], str],
    directory: Path,
    is_enough: Callable[[str], bool],
    room: Path | None = None,
) -> Said:
    """Waits until `is_enough` accepts the output or the launchers exit, and then stops the launchers.

    In a `room` (a cgroup) with little memory, the fault occurs when the kernel kills a process, however long it took to
    fill the memory.
    """
    deadline_s, after_s = time.monotonic() + LIMIT_S, None
    while after_s is None and time.monotonic() < deadline_s:
        if room is not None and not (directory / "fault").exists() and _has_killed(room):
            (directory / "fault").write_text(str(time.monotonic()))
        has_ended = all(launcher.poll() is not None for launcher in launchers)
        if is_enough(said()):
            with contextlib.suppress(OSError, ValueError):
                after_s = time.monotonic() - float((directory / "fault").read_text())
            break
        if has_ended:
            break
        time.sleep(_EVERY_S)
    for launcher in launchers:
        if after_s is not None:  # later lines are consequences of the fault
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(1)
        launcher.terminate()
    for launcher in launchers:
        launcher.wait()
    return Said(said(), after_s)


@contextlib.contextmanager
def _room(fault: str) -> Iterator[Path | None]:
    """Yields a cgroup with little memory if the fault is to exhaust it."""
    if fault != "memory":
        yield None
        return
    directory = _MEMORY / f"paceline-verdict-{os.getpid()}-{secrets.token_hex(4)}"
    directory.mkdir()
    (directory / "memory.limit_in_bytes").write_text(str(1200 << 20))
    try:
        yield directory
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                directory.rmdir()
                break
            time.sleep(0.05)


def _has_killed(room: Path) -> bool:
    """Returns True if the kernel has killed a process in a cgroup that ran out of memory."""
    return re.search(r"^oom_kill [1-9]", (room / "memory.oom_control").read_text(), re.MULTILINE) is not None


def torchs(fault: str, ranks: int) -> Said:
    """Runs the program under torchrun with gloo; returns the output of torch's analyzer for the flight recorders."""
    with tempfile.TemporaryDirectory(prefix="torch-verdict-") as name:
        variables = {**ENVIRONMENT, "TORCH_FR_BUFFER_SIZE": "2000", "OMP_NUM_THREADS": "1"}
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        with open(Path(name, "said"), "w") as output:
            launcher = subprocess.Popen(
                [sys.executable, *words, PROGRAM, "torch", fault, name], stdout=output, stderr=output, env=variables
            )
            deadline_s = time.monotonic() + LIMIT_S
            while launcher.poll() is None and time.monotonic() < deadline_s:
                fault_file, traces = Path(name, "fault"), list(Path(name).glob("trace_*"))
                patience_s = program.DUMP_AFTER_S + (
                    1 if len(traces) == ranks else 15
                )  # writing the flight recorders takes a long time
                if fault_file.exists() and time.time() - fault_file.stat().st_mtime > patience_s:
                    break
                time.sleep(0.05)
            _end(launcher)
        traces = Path(name, "traces")
        traces.mkdir()
        for path in Path(name).glob("trace_*"):
            path.rename(traces / path.name)
        analyzer = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(traces), "-p", "trace_"]
        done = subprocess.run(analyzer, capture_output=True, text=True, timeout=60, env=variables)
        return Said(done.stdout + done.stderr, None)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Stops torchrun and its workers, one of which may be suspended."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    pids = [int(pid) for pid in re.findall(r"\d+", children.read_text())] if children.exists() else []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    launcher.terminate()
    try:
        launcher.wait(10)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
