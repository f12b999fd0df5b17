"""Calls that fail on ranks of several hosts, and the errors that they raise."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import torch

import paceline as dist

SOON_S = 20.0  # much longer than a failure report takes on a busy machine, much shorter than the calls' timeouts


def told_by(call: Callable[[], object]) -> tuple[str, str, float]:
    """Returns the error's type and message, and the time until it was raised."""
    started = time.monotonic()
    try:
        call()
    except dist.CollectiveError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", time.monotonic() - started


def told_to(number: int, message: str) -> bool:
    """Returns True if the error states that its rank observed the failure, or names the rank that reported it."""
    me = rf"rank {number} \(h\d, pid \d+\)"
    return (
        re.search(
            rf", detected by ({me}|rank (?!{number} )\d \(h\d, pid \d+\), which reported it to {me}) in ", message
        )
        is not None
    )


def world() -> dist.ProcessGroup:
    group = dist.GroupMember.WORLD
    assert group is not None
    return group


def wait_for(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


CALLS: dict[str, Callable[[dist.ProcessGroup], object]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(100_000), group=group),
    "all_reduce, async": lambda group: wait_for(dist.all_reduce(torch.ones(100_000), group=group, async_op=True)),
    "barrier": lambda group: dist.barrier(group),
    "recv": lambda group: group.recv(torch.empty(3), 1, async_op=False),
    "recv, async": lambda group: group.recv(torch.empty(3), 1, async_op=True).wait(),
    "send": lambda group: group.send(torch.ones(100_000), 1, async_op=False),
}
