"""The handles by which torch.distributed's `_reconfigure` is told which processes form a group from now on."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Set as AbstractSet
from dataclasses import astuple, dataclass

from paceline.engine.failures import Member
from paceline.engine.processes import Process

_PREFIX = "paceline:"


@dataclass(frozen=True, order=True)
class Handle:
    """A rank's side of one process group: the process, and a token that no other group of the process has.

    It stays the same for the life of the group object, whatever ranks that has. Handles in a set are ordered by `rank`,
    the rank that the group began with.
    """

    rank: int
    token: str
    host: str
    namespace: str
    pid: int
    started: int

    @staticmethod
    def mine(rank: int) -> Handle:
        """Returns a new handle for a group in which this process is `rank`."""
        me = Process.mine()
        return Handle(rank, secrets.token_hex(8), socket.gethostname(), me.namespace, me.pid, me.started)

    @staticmethod
    def parse(text: str) -> Handle:
        """Returns the handle that `str` made `text` of.

        Raises:
            ValueError: `text` is not a handle of this backend.
        """
        try:
            rank, token, host, namespace, pid, started = json.loads(text.removeprefix(_PREFIX))
            handle = Handle(int(rank), str(token), str(host), str(namespace), int(pid), int(started))
        except (ValueError, TypeError):
            handle = None
        if handle is None or not text.startswith(_PREFIX):
            raise ValueError(
                f"{text!r} is not a handle of the backend 'paceline'; pass what "
                "torch.distributed._get_reconfigure_handle() returned on each rank"
            )
        return handle

    def __str__(self) -> str:
        return _PREFIX + json.dumps(astuple(self), separators=(",", ":"))

    def member(self, rank: int) -> Member:
        """Returns the process as `rank` of a group."""
        return Member(rank, self.host, self.pid, Process(self.namespace, self.pid, self.started))


def in_rank_order(handles: AbstractSet[str] | list[str]) -> list[Handle]:
    """Returns the handles in the order of their new ranks: a list's own, and a set's by their former ranks.

    Raises:
        ValueError: there are none, one is there twice, or one is not of this backend.
    """
    order = [Handle.parse(each) for each in handles]
    if not order:
        raise ValueError("_reconfigure was given no handles; pass those of all ranks that are to form the group")
    if len(set(order)) < len(order):
        twice = next(each for each in order if order.count(each) > 1)
        raise ValueError(f"_reconfigure was given the handle of {twice.member(twice.rank)} twice; pass each once")
    return sorted(order) if isinstance(handles, AbstractSet) else order
