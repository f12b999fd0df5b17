"""Named points in the code at which a test kills, stops or delays a worker. Without orders, `failpoint` does nothing.

`PACELINE_FAILPOINTS` holds comma-separated orders of the form `WORKER:POINT@COUNT=ACTION`. When the worker named WORKER
reaches POINT for the COUNT-th time, it performs ACTION, which is "kill", "stop", "exit", "raise", "delay" or "lose"
(the worker's connections to the other workers fail).
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from paceline.errors import StoreConnectionError

VARIABLE = "PACELINE_FAILPOINTS"
POINTS = (
    "join.ready",
    "view.forming",
    "view.entering",
    "view.formed",
    "view.agreed",
    "state.before_sending",
    "state.sent",
    "state.loaded",
    "result.taken",
    "round.begun",
    "round.computed",
    "round.summed",
    "round.voted",
    "round.committed",
    "batch.begun",
    "loop.over",
)
# Points reached during a state transfer by the senders, by a sender's forked child, and by the receiver.
POINTS_OF_SENDERS = ("join.snapshot", "join.serving", "join.logged")
POINTS_OF_CHILDREN = ("join.sending",)
POINTS_OF_RECEIVERS = ("join.chunk", "join.restored", "join.replay", "join.near")
# Points reached only by loops with DistributedDataParallel and StatefulLoader.
POINTS_OF_DDP_LOOPS = ("batch.dealt", "mean.weighed", "mean.applied")
# Points before each disk operation on a checkpoint, and after the last operation of a save.
POINTS_OF_CHECKPOINTS = (
    "checkpoint.make",
    "checkpoint.create",
    "checkpoint.write",
    "checkpoint.sync",
    "checkpoint.rename",
    "checkpoint.remove",
    "checkpoint.done",
)
# Points reached while checkpoints are copied to the memory of launchers.
POINTS_OF_COPIES = ("copies.begin", "copies.write", "copies.finish", "copies.commit", "copies.done")
_ALL_POINTS = (
    *(*POINTS, *POINTS_OF_SENDERS, *POINTS_OF_CHILDREN, *POINTS_OF_RECEIVERS),
    *(*POINTS_OF_DDP_LOOPS, *POINTS_OF_CHECKPOINTS, *POINTS_OF_COPIES),
)

_reached: Counter[str] = Counter()
_orders: dict[tuple[str, int], str] = {}


def arm(worker: str, orders: str) -> None:
    """Arms the orders for `worker`, ignoring those for others; raises ValueError if any order is invalid."""
    _orders.clear()
    for order in filter(None, orders.split(",")):
        try:
            where, action = order.split("=")
            name, point = where.split(":")
            point, count = point.split("@")
            number = int(count)
        except ValueError:
            raise ValueError(f"{VARIABLE} has {order!r}; it must be WORKER:POINT@COUNT=ACTION") from None
        if point not in _ALL_POINTS or action not in _ACTIONS:
            raise ValueError(f"{VARIABLE} has {order!r}; points are {_ALL_POINTS}, and actions {tuple(_ACTIONS)}")
        if name == worker:
            _orders[point, number] = action


def failpoint(point: str) -> None:
    """Performs the action ordered for this point, if any."""
    if _orders:
        _reached[point] += 1
        if action := _orders.get((point, _reached[point])):
            _ACTIONS[action]()


def _raise() -> None:
    raise RuntimeError("a failpoint raised this error")


def _lose() -> None:
    raise StoreConnectionError("a failpoint broke the connections")


_ACTIONS: dict[str, Callable[[], object]] = {
    "kill": partial(signal.raise_signal, signal.SIGKILL),
    "stop": partial(signal.raise_signal, signal.SIGSTOP),
    "exit": partial(os._exit, 3),
    "raise": _raise,
    "delay": partial(time.sleep, 0.3),
    "lose": _lose,
}
