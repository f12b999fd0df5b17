"""Finds the NCCL library at run time: the one that torch has loaded, NVIDIA's wheel, or the system's."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.engine.nccl.functions import Functions

VARIABLE = "PACELINE_NCCL_LIBRARY"
OLDEST = 21400
_NAME = "libnccl.so"
_SONAME = "libnccl.so.2"
_INSTALL = "install torch with CUDA, which brings it, or the package nvidia-nccl-cu12 (or -cu13, as torch.version.cuda)"


class LibraryMissingError(Exception):
    """There is no usable NCCL library; the message says what was found and what to do."""


@dataclass(frozen=True)
class Library:
    """A loaded library: its path, its version as `nccl.h` encodes it, and its functions."""

    path: str
    version: int
    functions: Functions


def say_version(code: int) -> str:
    """Returns a version code as text: 22105 as "2.21.5". Codes before 2.9 have one digit less.

    >>> say_version(22105), say_version(2708)
    ('2.21.5', '2.7.8')
    """
    major = 10000 if code >= 10000 else 1000
    return f"{code // major}.{code % major // 100}.{code % 100}"


def load(path: str) -> Library:
    """Loads the library at `path`.

    Raises:
        LibraryMissingError: the file cannot be loaded, is not NCCL, or is too old.
    """
    try:
        loaded = ctypes.CDLL(path)
    except OSError as error:
        raise LibraryMissingError(f"the NCCL library {path} cannot be loaded ({error}); {_INSTALL}") from error
    old = f"older than {say_version(OLDEST)}, the first whose communicators start without blocking"
    fix = f"so that a missing rank ends in an error and not in a hang; {_INSTALL}, or name a newer one in {VARIABLE}"
    try:
        functions = Functions(loaded)
    except AttributeError as error:
        raise LibraryMissingError(f"{path} is no NCCL library, or one {old}, {fix} ({error})") from error
    version = functions.version()
    if version < OLDEST:
        raise LibraryMissingError(f"{path} is NCCL {say_version(version)}, {old}, {fix}")
    return Library(path, version, functions)


@functools.cache
def find() -> Library:
    """Returns the library of this process: the one that PACELINE_NCCL_LIBRARY names, or else the first one found.

    The search looks for a library that is loaded already (by torch), then in NVIDIA's wheel, then in the system.

    Raises:
        LibraryMissingError: there is no library, or the first one found is too old.
    """
    named = os.environ.get(VARIABLE)
    if named:
        try:
            return load(named)
        except LibraryMissingError as error:
            raise LibraryMissingError(f"{error}. {VARIABLE} names it") from error
    for path in _candidates():
        return load(path)
    raise LibraryMissingError(
        f"no NCCL library ({_SONAME}) is loaded, in the wheel nvidia-nccl, or known to the system; {_INSTALL}, or name "
        f"it in {VARIABLE}"
    )


def _candidates() -> Iterator[str]:
    yield from _loaded()
    yield from _of_wheel()
    system = ctypes.util.find_library("nccl")
    if system is not None:
        yield system


def _loaded() -> Iterator[str]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")
        if Path(path[2]).name.startswith(_NAME):
            yield "/" + path[2]


def _of_wheel() -> Iterator[str]:
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "lib" / _SONAME
        if path.exists():
            yield str(path)
