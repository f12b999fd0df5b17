"""Runs the plug-in's tests with a different release of torch, in a separate environment.

`PACELINE_OTHER_TORCH` is the path of that environment's interpreter. The environment must have the same version of
Python, and contain torch, msgspec, numpy, pytest, pytest-timeout and hypothesis. `make plugin RELEASE=2.6` creates one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline

VARIABLE = "PACELINE_OTHER_TORCH"
PYTHON = os.environ.get(VARIABLE)
HERE = Path(__file__).parent
MODULES = sorted(path.name for path in HERE.glob("test_plugin*.py") if path != Path(__file__))
FRAMEWORKS = "test_plugin_frameworks.py"  # these tests require packages that pin torch


@pytest.mark.skipif(not PYTHON, reason=f"set {VARIABLE} to an interpreter with another torch, or run `make plugin`")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("module", [module for module in MODULES if module != FRAMEWORKS])
def test_the_plug_in_works_with_another_torch(module, tmp_path):
    (tmp_path / "paceline").symlink_to(Path(paceline.__file__).parent)  # only this package, not the torch beside it
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    environment.pop(VARIABLE)
    version = subprocess.run(
        [str(PYTHON), "-c", "import sys, torch, paceline._core; print(*sys.version_info[:2], torch.__version__)"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert version.returncode == 0, f"{PYTHON} has to be Python {sys.version_info[:2]}\n{version.stderr}"
    assert version.stdout.split()[-1] != torch.__version__, "that interpreter has the torch of the other tests"
    command = [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak and not gpu"]
    done = subprocess.run([*command, str(HERE / module)], env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert " passed" in done.stdout or " skipped" in done.stdout, "a module is skipped where torch lacks what it tests"
