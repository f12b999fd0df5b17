"""Finds the page of a job: by its address, by the job's directory, or that of the job that was started last."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.cli.top.client import Address
from paceline.observe.live.addresses import ADDRESS_FILE
from paceline.observe.runs import State, list_runs, runs_directory


class NoPageError(ValueError):
    """There is no page to look at."""


def find(target: str | None) -> Address:
    """Returns the address of a page.

    Args:
        target: an address as `paceline run --dash` prints it, a job's directory, or its name among those that
            `paceline runs` lists; None for the job that was started last of those that have a page.

    Raises:
        NoPageError: there is no such page.
    """
    if target is None:
        return _latest()
    if "://" in target:
        try:
            return Address.parse(target)
        except ValueError as error:
            raise NoPageError(str(error)) from None
    for directory in (Path(target), runs_directory() / target):
        if (directory / ADDRESS_FILE).is_file():
            return _read(directory / ADDRESS_FILE)
    raise NoPageError(
        f"{target} is no directory of a running job that was started with `paceline run --dash`, and no address; "
        "`paceline runs` lists the jobs"
    )


def _latest() -> Address:
    for run in list_runs(runs_directory()):
        if run.state is State.RUNNING and (run.directory / ADDRESS_FILE).is_file():
            return _read(run.directory / ADDRESS_FILE)
    raise NoPageError(
        "no job of yours runs on this machine with a page; start it with `paceline run --dash`, or give the directory "
        "that it was told to use by --log-dir"
    )


def _read(path: Path) -> Address:
    try:
        told = json.loads(path.read_text())
        return Address(told["token"], port=told.get("port", 0), prefix=told["prefix"], path=told.get("path"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoPageError(f"{path} cannot be read as the address of a page ({error})") from error
