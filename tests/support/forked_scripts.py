"""Runs a script in a fork of a process that has torch already, as `python SCRIPT` does in one that imports it."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys

_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PACELINE_SECRET")


def run_script(path: str, *arguments: str, alone: bool = False) -> str:
    """Runs in a rank of `ranks(n)` or a worker of `elastic_job`; returns what the script prints.

    Args:
        path: the script.
        arguments: its arguments.
        alone: whether it runs as without a launcher.
    """
    if alone:
        for name in _OF_A_RANK:
            os.environ.pop(name, None)
    sys.argv = [path, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def run_alone(path: str, *arguments: str) -> str:
    """The same as without a launcher."""
    return run_script(path, *arguments, alone=True)
