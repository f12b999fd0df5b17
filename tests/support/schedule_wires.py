"""Links in memory, over which threads run schedules for a library that cannot send messages itself."""

from __future__ import annotations

import ctypes
import queue
import time
from collections import defaultdict

import torch

from paceline.comm.engine.adapters.serial_channel import CallTimeout

COUNT = 5

HOSTS = {2: [[0], [1]], 3: [[0, 1], [2]], 4: [[0, 2], [1, 3]]}


class Link:
    """A link between two ranks; messages and receives are matched in the order in which they are posted."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.posted: list[ReceivedMessage] = []


class ReceivedMessage:
    def __init__(self, link: Link, address: int, nbytes: int) -> None:
        self.link, self.address, self.nbytes = link, address, nbytes
        link.posted.append(self)

    def wait(self, deadline_ns: int) -> None:
        while self in self.link.posted:
            try:
                data = self.link.messages.get(timeout=max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9))
            except queue.Empty:
                raise CallTimeout from None
            first = self.link.posted.pop(0)
            assert len(data) == first.nbytes
            ctypes.memmove(first.address, data, first.nbytes)


Links = defaultdict[tuple[int, int], Link]


class SentMessage:
    def wait(self, deadline_ns: int) -> None:
        """Returns at once, because the message was buffered."""


class Wire:
    """Links with unlimited buffers between threads."""

    def __init__(self, links: Links, rank: int) -> None:
        self.links, self.rank = links, rank

    def send(self, peer: int, address: int, nbytes: int) -> SentMessage:
        self.links[self.rank, peer].messages.put(ctypes.string_at(address, nbytes))
        return SentMessage()

    def receive(self, peer: int, address: int, nbytes: int) -> ReceivedMessage:
        return ReceivedMessage(self.links[peer, self.rank], address, nbytes)


def pieces(tensor: torch.Tensor) -> list[int]:
    """Returns the addresses and sizes of a tensor's two pieces, as if it were a list of tensors."""
    first = tensor[:2]
    rest = tensor[2:]
    return [first.data_ptr(), first.nbytes, rest.data_ptr(), rest.nbytes]
