"""Runs a script in a fork of a process that has imported torch, with the same result as `python SCRIPT`."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys

_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PACELINE_SECRET")


def run_script(path: str, *arguments: str, alone: bool = False) -> str:
    """Runs a script on a rank of `ranks(n)` or in a worker of `elastic_job`; returns its output.

    Args:
        path: The path of the script.
        arguments: The arguments of the script.
        alone: True to run the script as if it had no launcher.
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
    """Runs a script as if it had no launcher; returns its output."""
    return run_script(path, *arguments, alone=True)
