"""Who the ranks are, for engines that do not find out themselves."""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta

from paceline.engine.failures import Member
from paceline.errors import RendezvousTimeoutError, StoreTimeoutError
from paceline.store.base import Store


def exchange_members(store: Store, rank: int, world_size: int, timeout_s: float) -> tuple[Member, ...]:
    """Publishes this rank's host and process and reads the others'.

    Raises:
        RendezvousTimeoutError: a rank did not publish its own; the message names it.
    """
    keys = [f"members/{each}" for each in range(world_size)]
    store.set(keys[rank], json.dumps([socket.gethostname(), os.getpid()]))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except StoreTimeoutError as error:
        absent = [str(each) for each, key in enumerate(keys) if not store.check([key])]
        raise RendezvousTimeoutError(
            f"rank {rank}: waited {timeout_s:.0f} s for {world_size} ranks; {', '.join(absent)} did not arrive. "
            "Look at their output, or raise timeout="
        ) from error
    return tuple(Member(each, *json.loads(entry)) for each, entry in enumerate(store.multi_get(keys)))
