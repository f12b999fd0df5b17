"""A job whose workers resist termination, for tests of what remains when its launcher exits."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from pathlib import Path

from launching import ENVIRONMENT, command, kill, processes_with, wait_until

# A worker that resists termination: it ignores signals and starts child processes, one of them in a session of its own.
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
WORKERS = 2


class Started:
    """A launcher whose processes can be found by a mark in their environment."""

    def __init__(self, directory: Path, *flags: str, words: str = "", terminal: int | None = None) -> None:
        self.mark = f"PACELINE_TEST_MARK={secrets.token_hex(8)}"
        self.base = directory / secrets.token_hex(4)
        script = Path(f"{self.base}-stubborn.py")  # not shared, because another job might still read it
        script.write_text(STUBBORN)
        arguments = command(f"--nproc-per-node={WORKERS}", *flags, str(script), str(self.base), words)
        name, value = self.mark.split("=")
        self.scratch = directory / f"tmp-{secrets.token_hex(4)}"
        self.scratch.mkdir()
        environment = {**ENVIRONMENT, name: value, "TMPDIR": str(self.scratch)}
        self._said = Path(f"{self.base}-said")
        streams = subprocess.DEVNULL if terminal is None else terminal
        with open(self._said, "w") as said:
            self.process = subprocess.Popen(
                arguments,
                stdin=streams,
                stdout=streams,
                stderr=said if terminal is None else terminal,
                env=environment,
                start_new_session=True,
            )

    def wait_to_hear(self, text: str) -> None:
        wait_until(lambda: text in self._said.read_text())

    @property
    def is_up(self) -> bool:
        return all(Path(f"{self.base}{rank}").exists() for rank in range(WORKERS))

    def wait_until_up(self) -> None:
        wait_until(lambda: self.is_up)

    def left(self) -> list[int]:
        return [pid for pid in processes_with(self.mark) if pid != self.process.pid]

    def expect_nothing_left(self) -> None:
        wait_until(lambda: not self.left())
        wait_until(lambda: not any(self.scratch.iterdir()))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.left(), 5)  # guards kill them and clean up
        kill(self.left())
        self.process.wait()
