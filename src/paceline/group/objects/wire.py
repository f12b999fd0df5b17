"""How objects travel from rank to rank: they are announced, sent as heads and buffers, and read.

A sending rank first announces its objects with two numbers each: the length of the head in bytes and the number of
buffers. A head has the buffers' lengths (uint64 each) and the object's body (`serialization.py`). An object that cannot
be sent is announced as -1, so that no rank waits for it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from paceline.errors import CollectiveObjectError
from paceline.group.exchange import as_memory, as_tensor, room_for
from paceline.group.objects.codec import MalformedPayload
from paceline.group.objects.serialization import Encoded, PickleRefused, decode, encode
from paceline.group.process_group import ProcessGroup

_CANNOT = -1


class Outgoing:
    """The objects that this rank sends: their `announcement`, their `heads` and, in the same order, their `buffers`."""

    def __init__(
        self, group: ProcessGroup, call: str, objects: Sequence[object], name: str, allow_pickle: bool
    ) -> None:
        """Encodes the objects; messages call them `name`, in which `{}` stands for the object's index."""
        self.error: Exception | None = None
        encoded: list[Encoded] = []
        try:
            for index, each in enumerate(objects):
                encoded.append(encode(each, name.format(index), allow_pickle))
        except Exception as error:  # raised after the other ranks have received the announcement
            self.error = error
            if isinstance(error, TypeError):
                self.error = TypeError(f"{group.me}: {call}: {error}")
        self.heads = [as_tensor(_head(each)) for each in encoded]
        self.buffers = [each.buffers for each in encoded]
        numbers = [(head.numel(), len(each)) for head, each in zip(self.heads, self.buffers, strict=True)]
        if self.error is not None:
            numbers = [(_CANNOT, 0)] * len(objects)
        self.announcement = torch.tensor(numbers, dtype=torch.int64, device="cpu").view(-1)


def announcement_for(count: int) -> torch.Tensor:
    """Returns an uninitialised tensor for the announcement of `count` objects."""
    return torch.empty(2 * count, dtype=torch.int64, device="cpu")


class Incoming:
    """Objects that a rank has announced; their heads have to be received first, and then their buffers.

    Raises:
        CollectiveObjectError: the sender could not send them, or the announcement is malformed.
    """

    def __init__(self, group: ProcessGroup, call: str, sender: int, announcement: torch.Tensor) -> None:
        self._sender = group.members[sender]
        self._me = group.me
        self._call = call
        numbers = announcement.view(-1, 2).tolist()
        if any(nbytes == _CANNOT for nbytes, _ in numbers):
            raise self._error("could not send its object; its own error says why", "Change what it sends")
        if any(buffers < 0 or nbytes <= 8 * buffers for nbytes, buffers in numbers):
            raise self._malformed(f"announced {numbers}")
        self._announced = numbers
        self._heads: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        self._lengths: list[list[int]] = []

    def head_rooms(self) -> list[torch.Tensor]:
        """Returns memory to receive the heads in.

        Raises:
            CollectiveObjectError: the memory cannot be allocated.
        """
        self._heads = self._rooms([nbytes for nbytes, _ in self._announced])
        return self._heads

    def buffer_rooms(self) -> list[torch.Tensor]:
        """Returns memory for the buffers of all objects, in order; the heads, which say their lengths, have arrived.

        Raises:
            CollectiveObjectError: the memory cannot be allocated.
        """
        self._lengths = [
            list(struct.unpack_from(f"<{count}Q", as_memory(head)))
            for head, (_, count) in zip(self._heads, self._announced, strict=True)
        ]
        self._buffers = self._rooms([length for lengths in self._lengths for length in lengths])
        return self._buffers

    def _rooms(self, lengths: list[int]) -> list[torch.Tensor]:
        try:
            return room_for(lengths)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise self._malformed(f"announced {sum(lengths)} bytes: {error}") from error

    def objects(self, allow_pickle: bool) -> list[object]:
        """Returns the objects, once everything has been received.

        Raises:
            CollectiveObjectError: one is malformed, or a pickle and `allow_pickle` is off.
        """
        objects = []
        at = 0
        for head, lengths in zip(self._heads, self._lengths, strict=True):
            buffers = self._buffers[at : at + len(lengths)]
            at += len(lengths)
            try:
                objects.append(decode(as_memory(head)[8 * len(lengths) :], buffers, allow_pickle))
            except PickleRefused:
                raise self._error(
                    "sent a pickle, which this rank does not read: it can run any code here",
                    "Pass allow_pickle=True on this rank too if you trust that one, or send there what needs no pickle",
                ) from None
            except MalformedPayload as error:
                raise self._malformed(str(error)) from error
        return objects

    def _malformed(self, seen: str) -> CollectiveObjectError:
        return self._error(
            f"sent what is no object ({seen})", "Look whether it runs the same versions of Paceline and of its modules"
        )

    def _error(self, seen: str, advice: str) -> CollectiveObjectError:
        return CollectiveObjectError(
            f"{self._me}: {self._call}: {self._sender} {seen}. {advice}. The group remains usable",
            rank=self._sender.rank,
        )


def _head(encoded: Encoded) -> bytearray:
    lengths = [buffer.numel() for buffer in encoded.buffers]
    return bytearray(struct.pack(f"<{len(lengths)}Q", *lengths)) + encoded.body
