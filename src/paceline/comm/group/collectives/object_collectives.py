"""Collectives and messages for Python objects.

An object is None, a number, str, bytes, datetime, Decimal, UUID, Path, range, a list, tuple, dict, set, deque, Counter
or OrderedDict of objects, a dense CPU tensor or parameter, or a NumPy array or scalar. The received object is equal to
the original and of the same type, with its tensors in new memory; the objects' sizes may differ between ranks. Any
other object is pickled if the sender sets `allow_pickle`, and is unpickled only if the receiver sets it too, because
unpickling can run arbitrary code.

Each rank in the group makes the same call. `src` and `dst` are ranks in the default group, and `group_src` and
`group_dst` are ranks in `group`. `timeout` (default: the group's timeout) applies to each of the two or three
collectives that implement a call. On a rank that is not in `group` a call does nothing.

A sender first announces each object with two numbers: the length of the head in bytes and the number of buffers. A head
consists of the lengths of the buffers (uint64 each) and the object's body (`object_codec.py`). The announcement -1
reports that an object cannot be sent, so no rank waits for the object.

All calls raise:
    TypeError: an object cannot be sent; the message reports its position in the argument and suggests an alternative.
    CollectiveObjectError: another rank's object is a pickle, is malformed, or could not be sent.
    CollectiveMismatchError, CollectiveTimeoutError, PeerLostError: the same as for collectives on tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from paceline.comm.group.buffers import as_memory, as_tensor, empty_buffers
from paceline.comm.group.collectives.object_codec import EncodedObject, MalformedPayload, PickleRefused, decode, encode
from paceline.comm.group.collectives.point_to_point import peer_rank, receive_from_any
from paceline.comm.group.default import Group, get_global_rank, resolve
from paceline.comm.group.eager import eager
from paceline.comm.group.process_group import ProcessGroup
from paceline.durations import Timeout
from paceline.errors import CollectiveMismatchError, CollectiveObjectError, short_repr

_CANNOT_SEND = -1
_TAG = 0


@eager
def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Group = None,
    allow_pickle: bool = False,
    timeout: Timeout | None = None,
) -> None:
    """Gathers every rank's `obj` on all ranks; `object_list[r]` receives rank r's object.

    Raises:
        ValueError: `object_list` does not have one entry for each rank.
    """
    call = "all_gather_object"
    chosen = resolve(group, "all_gather_object")
    if chosen is None:
        return
    _require_entries(object_list, chosen.size(), call, "object_list", "one for each rank")
    outgoing = OutgoingObjects(chosen, call, [obj], "obj", allow_pickle)
    incoming = _announce_to_all(chosen, call, outgoing, timeout)
    _all_gather(chosen, outgoing.heads, [sender.head_buffers() for sender in incoming], timeout)
    _all_gather(chosen, outgoing.buffers[0], [sender.data_buffers() for sender in incoming], timeout)
    object_list[:] = [sender.objects(allow_pickle)[0] for sender in incoming]


@eager
def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    allow_pickle: bool = False,
    timeout: Timeout | None = None,
) -> None:
    """Gathers `obj` from all ranks into the destination's `object_gather_list`, in rank order; other ranks pass None.

    The default destination is rank 0.

    Raises:
        ValueError: `object_gather_list` is missing or has the wrong length on the destination, or is passed on another
            rank.
    """
    call = "gather_object"
    chosen = resolve(group, "gather_object")
    if chosen is None:
        return
    root = chosen.rank_map.root_rank(dst, group_dst, call, "dst", 0)
    is_root = chosen.rank() == root
    if (object_gather_list is not None) != is_root:
        raise ValueError(
            f"rank {chosen.me.rank}: {call} takes object_gather_list on the destination, rank "
            f"{chosen.ranks[root]}, and on no other rank"
        )
    if object_gather_list is not None:
        _require_entries(object_gather_list, chosen.size(), call, "object_gather_list", "one for each rank")
    outgoing = OutgoingObjects(chosen, call, [obj], "obj", allow_pickle)
    incoming = _announce_to_all(chosen, call, outgoing, timeout)  # if one rank cannot send, all ranks must raise
    received = incoming if is_root else []
    try:
        _gather(chosen, outgoing.heads, [sender.head_buffers() for sender in received], root, timeout)
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"{call}: the destination is rank {chosen.ranks[root]} here; it must be the same on all ranks. {error}"
        ) from None
    _gather(chosen, outgoing.buffers[0], [sender.data_buffers() for sender in received], root, timeout)
    if object_gather_list is not None:
        object_gather_list[:] = [sender.objects(allow_pickle)[0] for sender in incoming]


@eager
def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | str | None = None,
    group_src: int | None = None,
    allow_pickle: bool = False,
    timeout: Timeout | None = None,
) -> None:
    """Broadcasts the source's objects to every rank's `object_list`, which must have the same length on all ranks.

    The default source is rank 0.

    Raises:
        TypeError: `object_list` is not a list.
        ValueError: `device` is not the CPU.
    """
    call = "broadcast_object_list"
    chosen = resolve(group, "broadcast_object_list")
    if chosen is None:
        return
    require_cpu(device, call)
    _require_list(object_list, call)
    root = chosen.rank_map.root_rank(src, group_src, call, "src", 0)
    outgoing = None
    announcement = announcement_for(len(object_list))
    if chosen.rank() == root:
        outgoing = OutgoingObjects(chosen, call, object_list, "object_list[{}]", allow_pickle)
        announcement = outgoing.announcement
    try:
        chosen.broadcast(announcement, root, timeout=timeout)
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"{call}: object_list has {len(object_list)} entries here, each announced by two numbers; it must have the "
            f"same number on all ranks. {error}"
        ) from None
    if outgoing is not None:
        if outgoing.error is not None:
            raise outgoing.error
        _broadcast(chosen, outgoing.heads, root, timeout)
        _broadcast(chosen, [buffer for buffers in outgoing.buffers for buffer in buffers], root, timeout)
        return
    incoming = IncomingObjects(chosen, call, root, announcement)
    _broadcast(chosen, incoming.head_buffers(), root, timeout)
    _broadcast(chosen, incoming.data_buffers(), root, timeout)
    object_list[:] = incoming.objects(allow_pickle)


@eager
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    allow_pickle: bool = False,
    timeout: Timeout | None = None,
) -> None:
    """Stores the source's `scatter_object_input_list[r]` as the first entry in rank r's `scatter_object_output_list`.

    The default source is rank 0. On other ranks, `scatter_object_input_list` is ignored.

    Raises:
        ValueError: the output list is empty, or the source's input list does not have one entry for each rank.
    """
    call = "scatter_object_list"
    chosen = resolve(group, "scatter_object_list")
    if chosen is None:
        return
    root = chosen.rank_map.root_rank(src, group_src, call, "src", 0)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError(f"{call}: scatter_object_output_list must be a list with at least one entry, for the object")
    announcement = announcement_for(chosen.size())
    outgoing = None
    if chosen.rank() == root:
        inputs = scatter_object_input_list
        _require_entries(inputs, chosen.size(), call, "scatter_object_input_list", "one for each rank, on the source")
        outgoing = OutgoingObjects(chosen, call, inputs or [], "scatter_object_input_list[{}]", allow_pickle)
        announcement = outgoing.announcement
    chosen.broadcast(announcement, root, timeout=timeout)
    if outgoing is not None and outgoing.error is not None:
        raise outgoing.error
    incoming = IncomingObjects(chosen, call, root, announcement.view(-1, 2)[chosen.rank()])
    heads = [[head] for head in outgoing.heads] if outgoing is not None else []
    _scatter(chosen, heads, incoming.head_buffers(), root, timeout)
    _scatter(chosen, outgoing.buffers if outgoing is not None else [], incoming.data_buffers(), root, timeout)
    scatter_object_output_list[0] = incoming.objects(allow_pickle)[0]


@eager
def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: torch.device | str | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    allow_pickle: bool = False,
    timeout: Timeout | None = None,
) -> None:
    """Sends the objects in `object_list`; the receiver's list must have the same length.

    `use_batch` has no effect. `timeout` applies to each of the two or three messages that implement a call.

    Raises:
        TypeError: an object cannot be sent; the receiver then also raises an error.
        ValueError: `device` is not the CPU, or the destination is invalid (see `send`).
    """
    call = "send_object_list"
    chosen = resolve(group, "send_object_list")
    if chosen is None:
        return
    require_cpu(device, call)
    _require_list(object_list, call)
    peer = peer_rank(chosen, dst, group_dst, call, "dst")
    outgoing = OutgoingObjects(chosen, call, object_list, "object_list[{}]", allow_pickle)
    chosen.send([outgoing.announcement], peer, _TAG, False, timeout)
    if outgoing.error is not None:
        raise outgoing.error
    for pieces in (outgoing.heads, [buffer for buffers in outgoing.buffers for buffer in buffers]):
        if pieces:
            chosen.send(pieces, peer, _TAG, False, timeout)


@eager
def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | str | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    allow_pickle: bool = False,
    timeout: Timeout | None = None,
) -> int:
    """Receives objects into `object_list`, from any rank if no source is specified.

    See `send_object_list` for the arguments.

    Returns:
        The sender's rank in the default group; -1 on a rank that is not in the group.

    Raises:
        CollectiveObjectError: an object is a pickle, is malformed, or could not be sent.
        ValueError: `device` is not the CPU, or the source is invalid (see `recv`).
    """
    call = "recv_object_list"
    chosen = resolve(group, "recv_object_list")
    if chosen is None:
        return -1
    require_cpu(device, call)
    _require_list(object_list, call)
    announcement = announcement_for(len(object_list))
    if src is None and group_src is None:
        peer = receive_from_any(chosen, [announcement], _TAG, timeout)
    else:
        peer = peer_rank(chosen, src, group_src, call, "src")
        chosen.recv([announcement], peer, _TAG, False, timeout)
    incoming = IncomingObjects(chosen, call, peer, announcement)
    for allocate in (incoming.head_buffers, incoming.data_buffers):
        pieces = allocate()
        if pieces:
            chosen.recv(pieces, peer, _TAG, False, timeout)
    object_list[:] = incoming.objects(allow_pickle)
    return get_global_rank(chosen, peer)


class OutgoingObjects:
    """The objects to send from this rank: their `announcement`, and their `heads` and `buffers` in the same order."""

    def __init__(
        self, group: ProcessGroup, call: str, objects: Sequence[object], name: str, allow_pickle: bool
    ) -> None:
        """Encodes the objects. In error messages they are called `name`, with `{}` replaced by the object's index."""
        self.error: Exception | None = None
        encoded: list[EncodedObject] = []
        try:
            for index, value in enumerate(objects):
                encoded.append(encode(value, name.format(index), allow_pickle))
        except Exception as error:  # raised only after the other ranks have received the announcement
            self.error = error
            if isinstance(error, TypeError):
                self.error = TypeError(f"{group.me}: {call}: {error}")
        self.heads = [as_tensor(_head(entry)) for entry in encoded]
        self.buffers = [entry.buffers for entry in encoded]
        numbers = [(head.numel(), len(buffers)) for head, buffers in zip(self.heads, self.buffers, strict=True)]
        if self.error is not None:
            numbers = [(_CANNOT_SEND, 0)] * len(objects)
        self.announcement = torch.tensor(numbers, dtype=torch.int64, device="cpu").view(-1)


class IncomingObjects:
    """Objects announced by a rank. Their heads are received first, and then their buffers.

    All methods raise a `CollectiveObjectError` if the sender could not send the objects or sent malformed data.
    """

    def __init__(self, group: ProcessGroup, call: str, sender: int, announcement: torch.Tensor) -> None:
        self._sender = group.members[sender]
        self._me = group.me
        self._call = call
        numbers = announcement.view(-1, 2).tolist()
        if any(nbytes == _CANNOT_SEND for nbytes, _ in numbers):
            raise self._error("could not send its object; see the error on that rank", "Change what it sends")
        if any(buffers < 0 or nbytes <= 8 * buffers for nbytes, buffers in numbers):
            raise self._malformed(f"announced {numbers}")
        self._announced = numbers
        self._heads: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        self._lengths: list[list[int]] = []

    def head_buffers(self) -> list[torch.Tensor]:
        """Allocates memory for the heads."""
        self._heads = self._allocate([nbytes for nbytes, _ in self._announced])
        return self._heads

    def data_buffers(self) -> list[torch.Tensor]:
        """Allocates memory for the buffers of all objects, in order. The heads must have been received."""
        self._lengths = [
            list(struct.unpack_from(f"<{count}Q", as_memory(head)))
            for head, (_, count) in zip(self._heads, self._announced, strict=True)
        ]
        self._buffers = self._allocate([length for lengths in self._lengths for length in lengths])
        return self._buffers

    def _allocate(self, lengths: list[int]) -> list[torch.Tensor]:
        try:
            return empty_buffers(lengths)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise self._malformed(f"announced {sum(lengths)} bytes: {error}") from error

    def objects(self, allow_pickle: bool) -> list[object]:
        """Decodes the objects. The heads and buffers must have been received."""
        objects = []
        first = 0
        for head, lengths in zip(self._heads, self._lengths, strict=True):
            buffers = self._buffers[first : first + len(lengths)]
            first += len(lengths)
            try:
                objects.append(decode(as_memory(head)[8 * len(lengths) :], buffers, allow_pickle))
            except PickleRefused:
                raise self._error(
                    "sent a pickle, which this rank does not load because it could run any code",
                    "Pass allow_pickle=True on this rank too if you trust the sender, or send an object that needs no "
                    "pickle",
                ) from None
            except MalformedPayload as error:
                raise self._malformed(str(error)) from error
        return objects

    def _malformed(self, seen: str) -> CollectiveObjectError:
        return self._error(
            f"sent a malformed object ({seen})", "Check that it runs the same versions of Paceline and of its modules"
        )

    def _error(self, seen: str, advice: str) -> CollectiveObjectError:
        return CollectiveObjectError(
            f"{self._me}: {self._call}: {self._sender} {seen}. {advice}. The group remains usable",
            rank=self._sender.rank,
        )


def announcement_for(count: int) -> torch.Tensor:
    """Allocates an uninitialized tensor for the announcement of `count` objects."""
    return torch.empty(2 * count, dtype=torch.int64, device="cpu")


def _head(encoded: EncodedObject) -> bytearray:
    lengths = [buffer.numel() for buffer in encoded.buffers]
    return bytearray(struct.pack(f"<{len(lengths)}Q", *lengths)) + encoded.body


def _announce_to_all(
    group: ProcessGroup, call: str, outgoing: OutgoingObjects, timeout: Timeout | None
) -> list[IncomingObjects]:
    announcements = [announcement_for(1) for _ in group.ranks]
    group.all_gather(announcements, outgoing.announcement, timeout=timeout)
    if outgoing.error is not None:
        raise outgoing.error
    return [IncomingObjects(group, call, rank, announcement) for rank, announcement in enumerate(announcements)]


def _broadcast(group: ProcessGroup, pieces: list[torch.Tensor], root: int, timeout: Timeout | None) -> None:
    if pieces:
        group.broadcast(pieces, root, timeout=timeout)


def _all_gather(
    group: ProcessGroup,
    mine: Sequence[torch.Tensor],
    received: Sequence[Sequence[torch.Tensor]],
    timeout: Timeout | None,
) -> None:
    """Gathers every rank's pieces on all ranks; `received[r]` receives rank r's pieces."""
    if any(piece.numel() for pieces in received for piece in pieces):
        group.all_gather(received, mine, timeout=timeout)


def _gather(
    group: ProcessGroup,
    mine: Sequence[torch.Tensor],
    received: Sequence[Sequence[torch.Tensor]],
    root: int,
    timeout: Timeout | None,
) -> None:
    """Gathers every rank's pieces into the root's `received`, in rank order; `received` is empty on other ranks."""
    group.all_to_all(received or [[]] * group.size(), _only_at(root, mine, group), timeout=timeout)


def _scatter(
    group: ProcessGroup,
    pieces: Sequence[Sequence[torch.Tensor]],
    received: Sequence[torch.Tensor],
    root: int,
    timeout: Timeout | None,
) -> None:
    """Sends the root's `pieces[r]` to rank r's `received`; `pieces` is empty on other ranks."""
    group.all_to_all(_only_at(root, received, group), pieces or [[]] * group.size(), timeout=timeout)


def _only_at(root: int, pieces: Sequence[torch.Tensor], group: ProcessGroup) -> list[Sequence[torch.Tensor]]:
    return [pieces if rank == root else [] for rank in range(group.size())]


def require_cpu(device: torch.device | str | None, call: str) -> None:
    """Checks that `device` is the CPU or None."""
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"{call}: device is {device}; objects are sent as CPU tensors; leave device out")


def _require_list(objects: object, call: str) -> None:
    if not isinstance(objects, (list, tuple)):
        raise TypeError(f"{call}: object_list is {short_repr(objects)}; it must be a list of objects")


def _require_entries(entries: list[Any] | None, count: int, call: str, name: str, what: str) -> None:
    if not isinstance(entries, list) or len(entries) != count:
        seen = f"has {len(entries)} entries" if isinstance(entries, list) else f"is {type(entries).__name__}"
        raise ValueError(f"{call}: {name} {seen}; it must be a list of {count}, {what}")
