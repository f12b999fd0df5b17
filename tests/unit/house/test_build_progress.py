"""An installation from source reports large downloads and compilation progress, and all output if it fails."""

from __future__ import annotations

import importlib.util
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "release" / "build_progress.py"
spec = importlib.util.spec_from_file_location("release_build_progress", SCRIPT)
assert spec is not None and spec.loader is not None
build_progress = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_progress)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (191.8 MB)",
            "downloading torch 2.13.0 (192 MB)",
        ),
        ("Downloading https://host/a/torch-2.13.0-cp311-none-any.whl (1.2 GB)", "downloading torch 2.13.0 (1200 MB)"),
        ("  Using cached scipy-1.17.1-cp311-none-any.whl (35.0 MB)", "taking from the cache: scipy 1.17.1 (35 MB)"),
        ("  Downloading msgspec-0.22.0-cp311-none-any.whl (0.2 MB)", None),
        ("  Downloading torch-2.13.0-cp311-none-any.whl.metadata (29 kB)", None),
        ("Installing collected packages: a, b, c", "installing 3 packages"),
        ("Installing collected packages: paceline", None),
        ("Collecting torch", None),
    ],
)
def test_pips_lines_become_messages(line, message):
    assert build_progress.InstallationProgress().message(line) == message


def test_a_large_wheel_of_a_folder_is_a_message(tmp_path):
    wheel = tmp_path / "torch-2.13.0+cpu-cp311-cp311-any.whl"
    with wheel.open("wb") as file:
        file.truncate(180_000_000)
    message = build_progress.InstallationProgress().message(f"Processing {wheel}")
    assert message == "unpacking torch 2.13.0+cpu (180 MB)"


def test_the_compilation_is_six_lines_whatever_its_size():
    progress = build_progress.InstallationProgress()
    lines = [f"  [{step}/63] Building CXX object a.o" for step in range(1, 64)]
    messages = [message for line in lines if (message := progress.message(line))]
    assert len(messages) == 6
    assert messages[0] == "compiling: 11 of 63 files" and messages[-1] == "compiling: 63 of 63 files"


def test_an_installation_that_fails_prints_pips_output():
    command = [sys.executable, str(SCRIPT), "--no-index", "no-such-package-of-ours"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "No matching distribution found for no-such-package-of-ours" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("==> pip install --no-index no-such-package-of-ours failed")


def test_the_compilation_is_shown_beside_pips_spinner(tmp_path):
    program = (
        "import os, subprocess, build_progress\n"
        "with build_progress.compilation_shown_on(os.open('shown', os.O_WRONLY | os.O_CREAT)):\n"
        "    subprocess.run(['echo', '[41/63] Building CXX object a.o'], check=True)\n"
        "print('after')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60
    )
    assert done.stdout == "[41/63] Building CXX object a.o\nafter\n", done.stderr
    shown = (tmp_path / "shown").read_bytes().decode()
    assert shown == "\r  Building wheel for paceline (pyproject.toml): 41 of 63 files ... -"


@pytest.mark.parametrize(
    ("words", "is_shown"),
    [(["install", "."], True), (["install", "-v", "."], False), (["install", "--verbose", "."], False)],
)
def test_the_terminal_is_that_of_a_pip_that_shows_a_spinner(tmp_path, words, is_shown):
    (tmp_path / "pip").write_text(
        "import subprocess, sys\n"
        "code = 'import build_progress, sys; sys.exit(build_progress.pip_terminal() is None)'\n"
        "sys.exit(subprocess.run([sys.executable, '-c', code], stdout=subprocess.DEVNULL).returncode)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PIP_VERBOSE"}
    environment["PYTHONPATH"] = str(SCRIPT.parent)
    master, terminal = pty.openpty()
    try:
        command = [sys.executable, str(tmp_path / "pip"), *words]
        on_terminal = subprocess.run(command, stdout=terminal, env=environment, timeout=60).returncode
        in_file = subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, timeout=60).returncode
    finally:
        os.close(master)
        os.close(terminal)
    assert on_terminal == (0 if is_shown else 1)
    assert in_file == 1
