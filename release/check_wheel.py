"""Builds the wheel, repairs it, installs it in an environment without a compiler, and trains with it: `make wheel`.

    python release/check_wheel.py                       the wheel of this interpreter
    python release/check_wheel.py --from-sdist          the same, built from the sources that would be published
    python release/check_wheel.py --python P --others Q ...   built by P; P and the Qs only run a rendezvous

The environment contains the wheel's dependencies and nothing else. torch and the example's data are shared with the
environment that runs this script, because they are large. docs/install.md describes what is published.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "build" / "wheel"
_QUIET = ("--quiet", "--disable-pip-version-check")
_KEPT = ("HOME", "TMPDIR", "LANG", "CC", "CXX", "CMAKE_CXX_COMPILER_LAUNCHER", "SSL_CERT_FILE")
_LONGEST_S = 1800
BORROWED = ("torch", "numpy", "scikit-learn")  # scikit-learn contains the digits
RENDEZVOUS = (
    "from paceline.comm.rendezvous.rendezvous import rendezvous\n"
    "met = rendezvous('env://', None, -1, -1, 60)\n"
    "print('rank', met.rank, 'of', met.world_size)\n"
    "met.store.close()\n"
)


class CheckFailed(Exception):
    """A defect of the wheel."""


def build(python: str, from_sdist: bool) -> Path:
    """Builds and repairs a wheel; returns the repaired one."""
    shutil.rmtree(PLACE, ignore_errors=True)
    source = str(ROOT)
    if from_sdist:
        # pip cannot build an sdist, and this command uses the project's own backend
        program = f"import linux_only; print(linux_only.build_sdist({str(PLACE / 'sdist')!r}))"
        _run([sys.executable, "-c", program], PYTHONPATH=str(ROOT / "release"))
        [source] = map(str, (PLACE / "sdist").glob("*.tar.gz"))
    ready = ["--no-build-isolation"] if python == sys.executable else []  # build requirements are in this environment
    _run([python, "-m", "pip", "wheel", *_QUIET, "--no-deps", *ready, "-w", str(PLACE / "raw"), source])
    [raw] = (PLACE / "raw").glob("*.whl")
    _run([sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", str(PLACE / "repaired"), str(raw)])
    [repaired] = (PLACE / "repaired").glob("*.whl")
    return repaired


def examine(wheel: Path) -> None:
    """Checks the name and the contents of a repaired wheel.

    Raises:
        CheckFailed: The wheel cannot be published.
    """
    if "-manylinux_" not in wheel.name:
        raise CheckFailed(f"{wheel.name} is not repaired: it must be tagged manylinux")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [about] = [name for name in names if name.endswith(".dist-info/METADATA")]
        [scripts] = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
        told, commands = archive.read(about).decode(), archive.read(scripts).decode()
    for missing, is_there in {
        "paceline/py.typed": "paceline/py.typed" in names,
        "paceline/__init__.pyi": "paceline/__init__.pyi" in names,
        "the classifier Typing :: Typed": "Classifier: Typing :: Typed" in told,
        "the command paceline": "paceline = paceline.__main__:main" in commands,
        "the license": any(name.endswith("/LICENSE") for name in names),
    }.items():
        if not is_there:
            raise CheckFailed(f"{wheel.name} lacks {missing}")


def bare(python: str, borrowed: Iterable[str] = ()) -> Path:
    """Creates an environment with only pip and the shared packages; returns its directory of executables."""
    place = PLACE / f"bare-{Path(python).name}"
    shutil.rmtree(place, ignore_errors=True)
    _run([python, "-m", "venv", str(place)])
    lent = PLACE / "lent"
    shutil.rmtree(lent, ignore_errors=True)
    lent.mkdir(parents=True)
    for name in sorted(_closure(borrowed)):
        _lend(metadata.distribution(name), lent)
    [packages] = place.glob("lib/python3*/site-packages")
    (packages / "lent.pth").write_text(f"{lent}\n")
    return place / "bin"


def _closure(names: Iterable[str]) -> set[str]:
    """Returns these packages and their transitive dependencies."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        needs = [Requirement(text) for text in metadata.requires(name) or ()]
        waiting += [each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def _lend(distribution: metadata.Distribution, place: Path) -> None:
    for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
        if not (place / top).exists():
            (place / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())


def install(wheel: Path, programs: Path, with_torch: bool) -> tuple[float, float]:
    """Installs the wheel without a compiler; returns the elapsed time and the processor time, in seconds."""
    began_s, before = time.monotonic(), os.times()
    needs = [] if with_torch else ["--no-deps"]
    _run([str(programs / "pip"), "install", *_QUIET, "--only-binary", ":all:", *needs, str(wheel)], PATH=str(programs))
    took_s, after = time.monotonic() - began_s, os.times()
    busy_s = sum(after[2:4]) - sum(before[2:4])  # processor time of child processes
    if not with_torch:
        words = [str(programs / "pip"), "install", *_QUIET, "--only-binary", ":all:", "msgspec", "xxhash", "shtab"]
        _run(words, PATH=str(programs))
    return took_s, busy_s


def try_out(programs: Path, with_torch: bool) -> None:
    """Runs the command, and trains on two ranks. Without torch, runs a rendezvous of two ranks instead.

    Raises:
        CheckFailed: The imported paceline is not the wheel's, or a rank did not complete.
    """
    where = _run([str(programs / "python"), "-c", "import paceline; print(paceline.__file__)"], PATH=str(programs))
    if not where.startswith(str(programs.parent)):
        raise CheckFailed(f"the environment imports {where.strip()}, not the wheel")
    print(_run([str(programs / "paceline"), "--version"], PATH=str(programs)), end="")
    script, arguments = ROOT / "examples" / "digits.py", ["--epochs", "1"]
    if not with_torch:
        script, arguments = PLACE / "rendezvous.py", []
        script.write_text(RENDEZVOUS)
    done = _run(
        [str(programs / "paceline"), "run", "--nproc-per-node", "2", str(script), *arguments], PATH=str(programs)
    )
    if "[rank 0]" not in done:
        raise CheckFailed(f"rank 0 printed nothing: {done}")
    print(done, end="")


def _run(words: Sequence[str], **environment: str) -> str:
    """Runs a command; returns its output.

    Raises:
        CheckFailed: The command failed; the message contains its output.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or name.startswith("PIP_") or "proxy" in name.lower()
    }
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**kept, "PATH": programs, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LONGEST_S,
    )
    if done.returncode != 0:
        raise CheckFailed(
            f"`{' '.join(map(str, words))}` ended with code {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def main(arguments: Sequence[str]) -> int:
    """Checks the wheel; returns the exit code."""
    parser = argparse.ArgumentParser(description="Builds the wheel, and checks it in environments without a compiler.")
    parser.add_argument("--from-sdist", action="store_true", help="build it from the sources that are published")
    parser.add_argument("--python", help="the interpreter that builds it; then torch is left out")
    parser.add_argument("--others", nargs="*", default=[], help="more interpreters to install it for")
    given = parser.parse_args(arguments)
    with_torch = given.python is None
    python = given.python or sys.executable
    try:
        wheel = build(python, given.from_sdist)
        examine(wheel)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
        for each in [python, *given.others]:
            programs = bare(each, BORROWED if with_torch else ())
            took_s, busy_s = install(wheel, programs, with_torch)
            spent = f"{took_s:.1f} s ({busy_s:.1f} s of processor time)"
            print(f"{wheel.name} with {Path(each).name}: installed in {spent} beyond torch", flush=True)
            try_out(programs, with_torch)
    except CheckFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
