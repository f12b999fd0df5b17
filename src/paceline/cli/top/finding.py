"""Finds a running job: by its page's address, by the job's directory, or the one that was started last."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.cli.top.client import Address
from paceline.observe.live.addresses import ADDRESS_FILE
from paceline.observe.runs import Run, State, list_runs, read_run, runs_directory


class NoJobError(ValueError):
    """There is no such job to look at."""


def find(target: str | None) -> Address | Run:
    """Returns the address of a job's page, or the job if it has none.

    Args:
        target: an address as `paceline run --dash` prints it, a job's directory, or its name among those that
            `paceline runs` lists; None for the job that was started last of those that run.

    Raises:
        NoJobError: no such job runs.
    """
    if target is None:
        return _latest()
    if "://" in target:
        try:
            return Address.parse(target)
        except ValueError as error:
            raise NoJobError(str(error)) from None
    for directory in (Path(target), runs_directory() / target):
        run = read_run(directory)
        if run is not None and run.state is State.RUNNING:
            return _of(run)
        if run is not None:
            raise NoJobError(f"{target} does not run any more: {run.state.value}; `paceline report` shows what is left")
    raise NoJobError(f"{target} is no directory of a job, and no address; `paceline runs` lists the jobs")


def _latest() -> Address | Run:
    for run in list_runs(runs_directory()):
        if run.state is State.RUNNING:
            return _of(run)
    raise NoJobError(
        "no job of yours runs on this machine; give the directory of one that was told to use another by --log-dir"
    )


def _of(run: Run) -> Address | Run:
    path = run.directory / ADDRESS_FILE
    if not path.is_file():
        return run
    try:
        told = json.loads(path.read_text())
        return Address(told["token"], port=told.get("port", 0), prefix=told["prefix"], path=told.get("path"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoJobError(f"{path} cannot be read as the address of a page ({error})") from error
