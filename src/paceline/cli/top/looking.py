"""Takes pictures of a running job: from its page, or from its recordings if it has no page."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.cli.top.client import Address, UnreachableError, picture
from paceline.observe.live.outside import OutOfReachError, OutsideView
from paceline.observe.runs import Run


def looking_at(job: Address | Run) -> Callable[[], dict[str, Any]]:
    """Returns a function that takes a picture of the job, as JSON has it, or raises `UnreachableError`."""
    if isinstance(job, Address):
        return lambda: picture(job)
    view = OutsideView(job)

    def look() -> dict[str, Any]:
        try:
            taken: dict[str, Any] = json.loads(msgspec.json.encode(view.look()))
        except OutOfReachError as error:
            raise UnreachableError(str(error)) from error
        return taken

    return look
