"""Releases: files generated from a table, other operating systems, and `paceline --version`."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import paceline
from paceline import _core
from paceline.cli.main import kernels

ROOT = Path(__file__).parents[3]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"release_{name}", ROOT / "release" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


matrix = load("matrix")


@pytest.mark.parametrize("name", matrix.FILES)
def test_a_workflow_is_what_the_table_says(name):
    assert (matrix.WORKFLOWS / name).read_text() == matrix.FILES[name](), "run `make workflows`"
    assert yaml.safe_load(matrix.FILES[name]())["jobs"]


def test_no_workflow_has_another_source():
    assert sorted(path.name for path in matrix.WORKFLOWS.iterdir()) == sorted(matrix.FILES)


def test_the_pairs_of_versions_are_those_of_the_table():
    pairs = yaml.safe_load(matrix.tests())["jobs"]["pairs"]["strategy"]["matrix"]["include"]
    assert pairs == [{"python": python, "torch": each} for python, found in matrix.TORCH.items() for each in found]
    assert list(matrix.TORCH) == PYTHONS
    oldest = min(tuple(map(int, each.split("."))) for versions in matrix.TORCH.values() for each in versions)
    assert f'"torch>={oldest[0]}.{oldest[1]}"' in PYPROJECT


def test_a_wheel_is_built_or_tested_for_each_version():
    [builds] = re.findall(r"^build = \[(.*)\]$", PYPROJECT, re.MULTILINE)
    assert builds == ", ".join(f'"cp{version.replace(".", "")}-*"' for version in PYTHONS)


def test_the_conda_recipe_has_the_projects_requirements():
    recipe = yaml.safe_load((ROOT / "release" / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == paceline.__version__
    [needs] = re.findall(r"^dependencies = \[(.*)\]$", PYPROJECT, re.MULTILINE)
    names = {"torch": "pytorch", "msgspec": "python-msgspec", "xxhash": "python-xxhash", "shtab": "shtab"}
    for name, least in re.findall(r'"(\w+)(>=[\d.]+)"', needs):
        assert f"{names[name]} {least}" in recipe["requirements"]["run"]
    [build] = re.findall(r"^requires = \[(.*)\]$", PYPROJECT, re.MULTILINE)
    for name, least in re.findall(r'"([\w-]+)(>=[\d.]+)"', build):
        assert f"{name} {least}" in recipe["requirements"]["host"]


def test_the_dockerfile_is_a_page():
    assert len((ROOT / "Dockerfile").read_text().splitlines()) <= 30


@pytest.mark.parametrize("system", ["darwin", "win32"])
@pytest.mark.parametrize(
    ("module", "path", "said"),
    [("linux_only", "release", "On Windows install it in WSL 2"), ("paceline", "src", "On Windows use it in WSL 2")],
)
def test_other_systems_get_one_sentence(system, module, path, said):
    code = f"import sys; sys.platform = {system!r}; import {module}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert f"Paceline runs on Linux only, and this is {system}" in last and said in last


def test_the_version_names_engine_and_kernels():
    done = subprocess.run([sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == f"paceline {paceline.__version__}"
    assert lines[1].startswith(f"engine: paceline, with its native core for {platform.machine()} (")
    assert lines[2] == f"CPU kernels: {kernels(_core.wire_levels(), platform.machine())}"
    assert lines[3].startswith("torch: ")


def test_kernels_are_named_as_people_know_them():
    assert kernels(["baseline", "avx2", "avx512"], "x86_64") == "AVX-512 (also AVX2, SSE2)"
    assert kernels(["baseline"], "aarch64") == "NEON"
    assert kernels(["baseline"], "riscv64") == "baseline"


def test_a_wheel_that_lacks_something_is_refused(tmp_path):
    checks = load("check_wheel")
    with pytest.raises(checks.CheckFailed, match="is not repaired"):
        checks.examine(tmp_path / "paceline-0.1.0-cp311-cp311-linux_x86_64.whl")
