"""What an engine gives a group: something that runs its collectives, and links for messages between two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline import _core

# Addresses and numbers of bytes, in turns.
Pieces = Sequence[int]


class Channel(Protocol):
    """Runs the collectives of one group, in the order in which they are called."""

    def all_reduce(
        self, address: int, count: int, dtype: int, reduce_op: int, timeout_ns: int, /
    ) -> _core.Outcome | None:
        """Of one dense tensor, in place; None when all went well."""

    def run(
        self,
        operation: int,
        dtype: int,
        reduce_op: int,
        root: int,
        count: int,
        timeout_ns: int,
        inputs: Sequence[Pieces],
        outputs: Sequence[Pieces],
        /,
    ) -> _core.Outcome | None:
        """Any call, to its end; None when all went well."""

    def submit(
        self,
        operation: int,
        dtype: int,
        reduce_op: int,
        root: int,
        count: int,
        timeout_ns: int,
        inputs: Sequence[Pieces],
        outputs: Sequence[Pieces],
        /,
    ) -> _core.Work:
        """Any call, behind those made before."""
        ...

    def close(self) -> None:
        """Ends it; idempotent."""


class Messages(Protocol):
    """Sends to and receives from single ranks of the group."""

    def send(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> _core.Message:
        """To a group rank; goes on by itself if it is to run in the background."""
        ...

    def receive(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> _core.Message:
        """From a group rank, or with -1 from any."""
        ...
