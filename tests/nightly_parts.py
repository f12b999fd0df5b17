"""Defines the parts of `make nightly`: their commands and requirements."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clusters.programs import missing_of_slurm

_MINUTE_S = 60
_HOUR_S = 60 * _MINUTE_S
_BIN = Path(sys.executable).parent
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PROGRAMS_OF_DOCS = "tests/ranks/test_docs.py"
_CLUSTERS = "tests/clusters"
_ARM_COMPILER = "aarch64-linux-gnu-g++"
_ARM_EMULATOR = "qemu-aarch64"
_ARM_LIBRARIES = "/usr/aarch64-linux-gnu"
_REPEATS_UNDER_SANITIZERS = "20"
_NEWEST_TORCH = "2.15"
_EXAMPLES_OF_PROPERTIES = "20"  # multiple of the number of examples in the suite


def _nothing_missing() -> str:
    return ""


@dataclass(frozen=True)
class Part:
    """Commands that run sequentially until one fails; `obstacle` returns a description of what is missing."""

    name: str
    does: str
    commands: list[list[str]]
    limit_s: float
    obstacle: Callable[[], str] = _nothing_missing
    environment: Mapping[str, str] = field(default_factory=dict)


def parts(root: Path) -> list[Part]:
    """Returns all parts, the fastest first."""
    return [
        _pictures_in_a_browser(root),
        _soak("docs", "runs the programs in the docs", _PROGRAMS_OF_DOCS, limit_s=30 * _MINUTE_S),
        _site(),
        _examples(),
        _properties(),
        _encrypted(),
        _soak(
            "soak",
            "runs the other tests that are marked `soak`",
            *(f"--ignore={path}" for path in (_PROGRAMS_OF_DOCS, _CLUSTERS)),
            limit_s=2 * _HOUR_S,
        ),
        _sanitizers(),
        _separate_files(),
        _cross_build(),
        _wheel(),
        _stable_abi(),
        _clang(),
        *(_other_python(minor) for minor in range(10, 15) if minor != sys.version_info.minor),
        *(_plugin_with_torch(release) for release in ("2.6", _NEWEST_TORCH)),
        _newest_torch(),
        _slurm(),
        _ray(),
        _schemas(),
        _gpu(),
        _bench(),
    ]


def _soak(name: str, does: str, *arguments: str, limit_s: float) -> Part:
    words = [sys.executable, "-m", "pytest", "-m", "soak and not gpu", *arguments]
    return Part(name, does, [words], limit_s)


def _pictures_in_a_browser(root: Path) -> Part:
    browser = _first_of(*_BROWSERS)
    pictures = sorted((root / "docs" / "pictures").glob("*.svg"))
    shown = tempfile.gettempdir()
    commands = [
        ["sh", "-c", '"$0" --headless --no-sandbox --user-data-dir="$1" --dump-dom "$2" | grep -q "</svg>"', *words]
        for picture in pictures
        for words in [[browser or "", f"{shown}/paceline-browser-{os.getpid()}", picture.as_uri()]]
    ]
    return Part(
        "browser",
        "opens each picture of the docs in a browser",
        commands,
        5 * _MINUTE_S,
        lambda: "" if browser else f"there is none of {', '.join(_BROWSERS)}",
    )


def _site() -> Part:
    does = "builds the documentation site in both languages, and checks its links"
    return Part("site", does, [["make", "site"]], 10 * _MINUTE_S)


def _examples() -> Part:
    commands = [
        [str(_BIN / "paceline"), "run", "--nproc-per-node", ranks, f"examples/{script}"]
        for script in ("digits.py", "char_lm.py", "checkpoints.py", "checkpoints_by_hand.py")
        for ranks in ("1", "2", "4")
    ]
    return Part("examples", "runs the examples in full on 1, 2 and 4 ranks", commands, _HOUR_S)


def _properties() -> Part:
    return Part(
        "properties",
        f"runs the tests of one process with {_EXAMPLES_OF_PROPERTIES} times as many random examples",
        [[sys.executable, "-m", "pytest", "-m", "not soak and not gpu", "-n", "auto", "--timeout=1800", "tests/unit"]],
        2 * _HOUR_S,
        environment={"PACELINE_TEST_EXAMPLES": _EXAMPLES_OF_PROPERTIES},
    )


def _encrypted() -> Part:
    left_out = (
        "test_encryption_of_hosts.py",
        "test_two_level.py",
    )  # they select a level or a different engine
    words = [sys.executable, "-m", "pytest", "-m", "not soak and not gpu", "tests/hosts"]
    return Part(
        "encrypted",
        "runs the tests on several hosts with encrypted connections",
        [[*words, *(f"--ignore=tests/hosts/{name}" for name in left_out)]],
        _HOUR_S,
        environment={"PACELINE_SECURITY": "encrypt"},
    )


def _sanitizers() -> Part:
    repeated = [
        [
            *(str(_BIN / "ctest"), "--test-dir", f"build/{kind}", "--output-on-failure"),
            *("--repeat", f"until-fail:{_REPEATS_UNDER_SANITIZERS}", "--parallel", "2"),
        ]
        for kind in ("address,undefined", "thread")
    ]
    does = f"runs the core's own tests {_REPEATS_UNDER_SANITIZERS} times under each sanitizer"
    return Part("sanitizers", does, [["make", "sanitize"], *repeated], 2 * _HOUR_S)


def _core_build(directory: str, compiler: str, *options: str) -> list[list[str]]:
    """Returns commands that build the core and its tests without Python, compiling each file separately."""
    return [
        [
            str(_BIN / "cmake"),
            *("-S", ".", "-B", directory, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={_BIN / 'ninja'}"),
            *(f"-DCMAKE_CXX_COMPILER={compiler}", "-DPACELINE_PYTHON=OFF", "-DPACELINE_NATIVE_TESTS=ON"),
            *("-DPACELINE_UNITY=OFF", *options),
        ],
        [str(_BIN / "cmake"), "--build", directory],
    ]


def _separate_files() -> Part:
    """Compiles each file separately, because other builds, which combine files, do not detect a missing `#include`."""
    commands = _core_build("build/files", "c++", "-DPACELINE_PYTHON=ON", f"-DPython_EXECUTABLE={sys.executable}")
    return Part("files", "compiles each file of the core by itself", commands, _HOUR_S)


def _cross_build() -> Part:
    """Returns a part that builds the core for arm64, and runs the core's tests if an emulator is installed."""
    emulator = shutil.which(_ARM_EMULATOR)
    options = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    commands = _core_build("build/arm64", _ARM_COMPILER, *options)
    if emulator:
        commands[0].append(f"-DCMAKE_CROSSCOMPILING_EMULATOR={emulator};-L;{_ARM_LIBRARIES}")
        commands.append([str(_BIN / "ctest"), "--test-dir", "build/arm64", "--output-on-failure"])
    does = "builds the core for arm64" + (" and runs its tests" if emulator else "")
    return Part("arm64", does, commands, _HOUR_S, lambda: _missing(_ARM_COMPILER))


def _wheel() -> Part:
    words = [sys.executable, "release/check_wheel.py", "--from-sdist"]
    return Part("wheel", "builds the wheel from the sources that are published, and trains with it", [words], _HOUR_S)


def _stable_abi() -> Part:
    """The wheel is built with one version of Python and must work with later ones."""
    found = [path for path in map(_interpreter, range(12, 15)) if path is not None]
    words = [sys.executable, "release/check_wheel.py", "--python", *found[:1], "--others", *found[1:]]
    return Part(
        "abi3",
        "builds the wheel of the stable ABI, and has two ranks meet with it",
        [words],
        _HOUR_S,
        lambda: "" if found else "there is no python3.12 or newer",
    )


def _clang() -> Part:
    commands = _core_build("build/clang", "clang++")
    commands.append([str(_BIN / "ctest"), "--test-dir", "build/clang", "--output-on-failure"])
    return Part("clang", "builds the core by clang and runs its tests", commands, _HOUR_S, lambda: _missing("clang++"))


def _other_python(minor: int) -> Part:
    """Runs the whole suite in a separate environment under build/."""
    interpreter = _interpreter(minor)
    words = ["make", "test", f"PYTHON={interpreter}", f"VENV=build/nightly/python3.{minor}"]
    return Part(
        f"python3.{minor}",
        f"runs the suite with Python 3.{minor}",
        [words],
        2 * _HOUR_S,
        lambda: "" if interpreter else f"there is no python3.{minor}",
    )


def _plugin_with_torch(release: str) -> Part:
    words = ["make", "plugin", f"RELEASE={release}"]
    return Part(f"plugin{release}", f"runs the tests of the plug-in with torch {release}", [words], 2 * _HOUR_S)


def _newest_torch() -> Part:
    """Runs the whole suite in a separate environment under build/."""
    words = ["make", "test", f"TORCH={_NEWEST_TORCH}", f"VENV=build/nightly/torch{_NEWEST_TORCH}"]
    return Part(f"torch{_NEWEST_TORCH}", f"runs the suite with torch {_NEWEST_TORCH}", [words], 2 * _HOUR_S)


def _interpreter(minor: int) -> str | None:
    """Returns the path of an interpreter that works. pyenv's commands for versions that are not selected fail."""
    name = f"python3.{minor}"
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in [shutil.which(name), *map(str, sorted(versions.glob(f"3.{minor}.*/bin/{name}")))]:
        if path and subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return path
    return None


def _slurm() -> Part:
    return _cluster("slurm", "runs jobs of Slurm on a cluster of network namespaces", "test_slurm.py", missing_of_slurm)


def _ray() -> Part:
    return _cluster("ray", "runs jobs on a cluster of Ray", "test_ray.py", lambda: _not_installed("ray", "ray[train]"))


def _schemas() -> Part:
    does = "compares the manifests for Kubernetes with the published schemas"
    package = "kubeflow-trainer-api"
    return _cluster(
        "schemas", does, "test_manifest_schemas.py", lambda: _not_installed(package.replace("-", "_"), package)
    )


def _cluster(name: str, does: str, file: str, obstacle: Callable[[], str]) -> Part:
    words = [sys.executable, "-m", "pytest", "-m", "cluster", f"{_CLUSTERS}/{file}"]
    return Part(name, does, [words], _HOUR_S, obstacle)


def _not_installed(module: str, package: str) -> str:
    return "" if importlib.util.find_spec(module) else f"there is no Python package {package}"


def _gpu() -> Part:
    words = [sys.executable, "bench/gpu.py", "--json", "build/gpu-cuda.json", "--log", "build/gpu-cuda.log"]
    return Part("gpu", "runs the tests that need a GPU", [words], _HOUR_S, lambda: _missing("nvidia-smi"))


def _bench() -> Part:
    usual = [sys.executable, "bench/run.py", "--results", "build/bench", "usual"]
    more = [[sys.executable, f"bench/{name}.py"] for name in ("death", "elastic", "hosts", "schedules")]
    return Part("bench", "runs every benchmark", [usual, *more], 3 * _HOUR_S)


def _first_of(*names: str) -> str | None:
    return next(filter(None, map(shutil.which, names)), None)


def _missing(tool: str) -> str:
    return "" if shutil.which(tool) else f"there is no {tool}"
