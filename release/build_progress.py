"""Prints the progress of an installation: a line for each large download, and for each part of the compilation.

python release/build_progress.py -c constraints.txt torch      (runs `pip install -c constraints.txt torch`)

The package's build backend also uses this module. pip hides a build's output, so `pip install .` would otherwise show
only a spinner.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LARGE_MB = 10  # smaller downloads are not printed
PARTS = 6  # the number of progress lines printed during compilation

NINJA_STEP = re.compile(r"\s*\[(\d+)/(\d+)\] (?:Building|Linking) ")
DOWNLOAD = re.compile(r"\s*(Downloading|Using cached) \S*?([^/\s]+)\.(?:whl|tar\.gz)\S* \(([\d.]+) (MB|GB)\)")
LOCAL_WHEEL = re.compile(r"Processing (\S+\.whl)")
PACKAGES = re.compile(r"Installing collected packages: (.+)")


def compiled_files(line: str) -> tuple[int, int] | None:
    """Returns the numbers of compiled files and of all files if `line` is one of ninja's progress lines."""
    step = NINJA_STEP.match(line)
    return (int(step[1]), int(step[2])) if step else None


class InstallationProgress:
    """Selects the lines from pip's verbose output that show the progress to a user."""

    def __init__(self) -> None:
        self._part = 0

    def message(self, line: str) -> str | None:
        """Returns the message for a line of pip's output, or None if the line is to be skipped."""
        if files := compiled_files(line):
            done, total = files
            part = done * PARTS // total
            if part == self._part:
                return None
            self._part = part
            return f"compiling: {done} of {total} files"
        if download := DOWNLOAD.match(line):
            megabytes = float(download[3]) * (1000 if download[4] == "GB" else 1)
            verb = "downloading" if download[1] == "Downloading" else "taking from the cache:"
            return self._large(verb, download[2], megabytes)
        if (wheel := LOCAL_WHEEL.match(line)) and Path(wheel[1]).is_file():
            return self._large("unpacking", Path(wheel[1]).stem, Path(wheel[1]).stat().st_size / 1e6)
        if packages := PACKAGES.match(line):
            number = packages[1].count(",") + 1
            return f"installing {number} packages" if number > 1 else None
        return None

    @staticmethod
    def _large(verb: str, file: str, megabytes: float) -> str | None:
        name = " ".join(file.split("-")[:2])  # the project and version in the name of a wheel or source archive
        return f"{verb} {name} ({megabytes:.0f} MB)" if megabytes >= LARGE_MB else None


def pip_install(arguments: Sequence[str]) -> int:
    """Runs `pip install` with `arguments`, and prints its progress, or all output on failure; returns the exit code."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--verbose", "--no-compile"]
    progress = InstallationProgress()
    output = []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            output.append(line)
            if message := progress.message(line):
                print(f"    {message}", flush=True)
    if pip.returncode:
        sys.stderr.write("".join(output))
        print(f"==> pip install {' '.join(arguments)} failed, for the reason above", file=sys.stderr)
    return pip.returncode


def pip_terminal() -> int | None:
    """Returns a descriptor of the terminal on which pip, the parent process, shows a spinner, or None."""
    parent = Path("/proc", str(os.getppid()))
    try:
        command = (parent / "cmdline").read_text(errors="replace").split("\0")
        is_pip = any(re.fullmatch(r"pip[\d.]*", Path(word).name) for word in command[:4])
        is_verbose = "PIP_VERBOSE" in os.environ or any(re.fullmatch(r"-v+|--verbose", word) for word in command)
        if not is_pip or is_verbose:
            return None
        terminal = os.open(parent / "fd" / "1", os.O_WRONLY | os.O_NOCTTY)
    except OSError:
        return None
    if os.isatty(terminal):
        return terminal
    os.close(terminal)
    return None


@contextmanager
def compilation_shown_on(terminal: int | None) -> Iterator[None]:
    """Writes the number of compiled files before pip's spinner, while standard output is still sent to pip.

    Args:
        terminal: A descriptor to write to, which is closed at the end, or None to show nothing.
    """
    if terminal is None:
        yield
        return
    sys.stdout.flush()
    standard_output = os.dup(1)
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(writer)

    def forward() -> None:
        with os.fdopen(reader, "rb") as lines:
            for line in lines:
                os.write(standard_output, line)
                if files := compiled_files(line.decode(errors="replace")):
                    # The spinner overwrites the last character, and at the end writes "done" there.
                    text = f"\r  Building wheel for paceline (pyproject.toml): {files[0]} of {files[1]} files ... -"
                    os.write(terminal, text.encode())

    forwarding = threading.Thread(target=forward)
    forwarding.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(standard_output, 1)  # also closes the last write end of the pipe
        forwarding.join()
        os.close(standard_output)
        os.close(terminal)


if __name__ == "__main__":
    sys.exit(pip_install(sys.argv[1:]))
