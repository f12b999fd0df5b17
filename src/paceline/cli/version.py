"""Says for `paceline --version` what is installed: the versions, the engine and the kernels that this machine runs."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from importlib import metadata

from paceline import __version__

_ON_X86 = {"avx512": "AVX-512", "avx2": "AVX2", "baseline": "SSE2"}
_ON_ARM = {"baseline": "NEON"}


class VersionAction(argparse.Action):
    """Prints the version and ends; what it says is looked up only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Prints the lines and ends the process with code 0."""
        print("\n".join(version_lines()))
        parser.exit()


def version_lines() -> list[str]:
    """Returns what `paceline --version` prints; torch is not imported for that."""
    from paceline import _core

    levels = _core.wire_levels()
    machine = platform.machine()
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return [
        f"paceline {__version__}",
        f"engine: paceline, with its native core for {machine} ({python})",
        f"CPU kernels: {kernels(levels, machine)}",
        f"torch: {_version_of('torch')}",
    ]


def kernels(levels: Sequence[str], machine: str) -> str:
    """Returns the SIMD levels of the kernels that this machine runs, the one that is used first.

    >>> kernels(["baseline", "avx2"], "x86_64"), kernels(["baseline"], "aarch64")
    ('AVX2 (also SSE2)', 'NEON')
    """
    names = _ON_X86 if machine == "x86_64" else _ON_ARM if machine == "aarch64" else {}
    fastest, *others = [names.get(level, level) for level in reversed(levels)]
    return f"{fastest} (also {', '.join(others)})" if others else fastest


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
