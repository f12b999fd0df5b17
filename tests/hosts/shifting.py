"""Runs a command with a shifted monotonic clock, in a time namespace: `python shifting.py SECONDS COMMAND...`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

_CLONE_NEWTIME = 0x00000080
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def shifted(seconds: int, *words: str) -> list[str]:
    """Returns the command that runs `words` with a shifted clock."""
    return [sys.executable, str(Path(__file__).resolve()), str(seconds), *words]


def why_not() -> str | None:
    """Returns the reason why clocks cannot be shifted here, or None."""
    done = subprocess.run(shifted(1, "true"), capture_output=True, text=True)
    return None if done.returncode == 0 else f"time namespaces: {done.stderr.strip().rpartition(chr(10))[2]}"


def main() -> int:
    seconds, *words = sys.argv[1:]
    if _libc.unshare(_CLONE_NEWTIME):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    Path("/proc/self/timens_offsets").write_text(f"monotonic {seconds} 0\nboottime {seconds} 0\n")
    with subprocess.Popen(words, preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)) as process:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: process.send_signal(number))
        return process.wait()


if __name__ == "__main__":
    sys.exit(main())
