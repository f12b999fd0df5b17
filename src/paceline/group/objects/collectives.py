"""Collectives on Python objects.

An object is None, a number, str, bytes, datetime, Decimal, UUID, Path, range, a list, tuple, dict, set, deque, Counter
or OrderedDict of objects, a dense CPU tensor or parameter, or a NumPy array or scalar. It arrives equal and of the same
type, its tensors in memory of their own; sizes may differ from rank to rank. Everything else is pickled if the sender
sets `allow_pickle`, and is read only if the receiver sets it too: reading a pickle can run any code.

Each rank of the group makes the same call. `src` and `dst` are ranks of the default group, `group_src` and `group_dst`
of `group`. `timeout` (default: the group's) limits each of the two or three collectives that a call consists of. On a
rank that is not in `group` a call does nothing.

All of them raise:
    TypeError: an object cannot be sent; the message names its place in the argument and what to send instead.
    CollectiveObjectError: another rank's object is a pickle, or malformed, or could not be sent.
    CollectiveMismatchError, CollectiveTimeoutError, PeerLostError: as for collectives on tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.durations import Timeout
from paceline.errors import CollectiveMismatchError
from paceline.group.arguments import root_rank
from paceline.group.default import Group, resolve
from paceline.group.eager import eager
from paceline.group.exchange import all_gather_pieces, gather_pieces, scatter_pieces
from paceline.group.objects.wire import Incoming, Outgoing, announcement_for
from paceline.group.process_group import ProcessGroup


@eager
def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Group = None,
    allow_pickle: bool = False,
    timeout: Timeout | None = None,
) -> None:
    """Puts every rank's `obj` into `object_list`, by rank.

    Raises:
        ValueError: `object_list` does not have one entry for each rank.
    """
    call = "all_gather_object"
    chosen = resolve(group)
    if chosen is None:
        return
    _require_entries(object_list, chosen.size(), call, "object_list", "one for each rank")
    outgoing = Outgoing(chosen, call, [obj], "obj", allow_pickle)
    incoming = _announce_to_all(chosen, call, outgoing, timeout)
    all_gather_pieces(chosen, outgoing.heads, [each.head_rooms() for each in incoming], timeout)
    all_gather_pieces(chosen, outgoing.buffers[0], [each.buffer_rooms() for each in incoming], timeout)
    object_list[:] = [each.objects(allow_pickle)[0] for each in incoming]


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
    """Puts every rank's `obj` into the destination's `object_gather_list`, by rank; other ranks pass None.

    The destination is rank 0 by default.

    Raises:
        ValueError: `object_gather_list` is missing on the destination, of another length, or given elsewhere.
    """
    call = "gather_object"
    chosen = resolve(group)
    if chosen is None:
        return
    root = root_rank(chosen, dst, group_dst, call, "dst", 0)
    here = chosen.rank() == root
    if (object_gather_list is not None) != here:
        raise ValueError(
            f"rank {chosen.me.rank}: {call} takes object_gather_list on the destination, rank "
            f"{chosen.ranks[root]}, and on no other rank"
        )
    if object_gather_list is not None:
        _require_entries(object_gather_list, chosen.size(), call, "object_gather_list", "one for each rank")
    outgoing = Outgoing(chosen, call, [obj], "obj", allow_pickle)
    incoming = _announce_to_all(chosen, call, outgoing, timeout)  # all learn if a rank cannot send
    read_here = incoming if here else []
    gather_pieces(chosen, outgoing.heads, [each.head_rooms() for each in read_here], root, timeout)
    gather_pieces(chosen, outgoing.buffers[0], [each.buffer_rooms() for each in read_here], root, timeout)
    if object_gather_list is not None:
        object_gather_list[:] = [each.objects(allow_pickle)[0] for each in incoming]


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
    """Puts the source's objects into every rank's `object_list`, which has the same length everywhere.

    The source is rank 0 by default.

    Raises:
        ValueError: `device` is not the CPU.
    """
    call = "broadcast_object_list"
    chosen = resolve(group)
    if chosen is None:
        return
    require_cpu(device, call)
    root = root_rank(chosen, src, group_src, call, "src", 0)
    outgoing = None
    announcement = announcement_for(len(object_list))
    if chosen.rank() == root:
        outgoing = Outgoing(chosen, call, object_list, "object_list[{}]", allow_pickle)
        announcement = outgoing.announcement
    try:
        chosen.broadcast(announcement, root, timeout=timeout)
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"{call}: object_list has {len(object_list)} entries here, announced by two numbers each; it must have as "
            f"many on all ranks. {error}"
        ) from None
    if outgoing is not None:
        if outgoing.error is not None:
            raise outgoing.error
        _broadcast(chosen, outgoing.heads, root, timeout)
        _broadcast(chosen, [buffer for each in outgoing.buffers for buffer in each], root, timeout)
        return
    incoming = Incoming(chosen, call, root, announcement)
    _broadcast(chosen, incoming.head_rooms(), root, timeout)
    _broadcast(chosen, incoming.buffer_rooms(), root, timeout)
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
    """Puts the source's `scatter_object_input_list[r]` into the first entry of rank r's `scatter_object_output_list`.

    The source is rank 0 by default. What other ranks pass for `scatter_object_input_list` is ignored.

    Raises:
        ValueError: the output list is empty, or the source's input list does not have one entry for each rank.
    """
    call = "scatter_object_list"
    chosen = resolve(group)
    if chosen is None:
        return
    root = root_rank(chosen, src, group_src, call, "src", 0)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError(f"{call}: scatter_object_output_list must be a list with at least one entry, for the object")
    announcement = announcement_for(chosen.size())
    outgoing = None
    if chosen.rank() == root:
        inputs = scatter_object_input_list
        _require_entries(inputs, chosen.size(), call, "scatter_object_input_list", "one for each rank, on the source")
        outgoing = Outgoing(chosen, call, inputs or [], "scatter_object_input_list[{}]", allow_pickle)
        announcement = outgoing.announcement
    chosen.broadcast(announcement, root, timeout=timeout)
    if outgoing is not None and outgoing.error is not None:
        raise outgoing.error
    incoming = Incoming(chosen, call, root, announcement.view(-1, 2)[chosen.rank()])
    heads = [[head] for head in outgoing.heads] if outgoing is not None else []
    scatter_pieces(chosen, heads, incoming.head_rooms(), root, timeout)
    scatter_pieces(chosen, outgoing.buffers if outgoing is not None else [], incoming.buffer_rooms(), root, timeout)
    scatter_object_output_list[0] = incoming.objects(allow_pickle)[0]


def require_cpu(device: torch.device | str | None, call: str) -> None:
    """Raises unless objects can be sent from `device`.

    Raises:
        ValueError: `device` is not the CPU.
    """
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"{call}: device is {device}; objects travel as CPU tensors, leave device out")


def _announce_to_all(group: ProcessGroup, call: str, outgoing: Outgoing, timeout: Timeout | None) -> list[Incoming]:
    announcements = [announcement_for(1) for _ in group.ranks]
    group.all_gather(announcements, outgoing.announcement, timeout=timeout)
    if outgoing.error is not None:
        raise outgoing.error
    return [Incoming(group, call, rank, each) for rank, each in enumerate(announcements)]


def _broadcast(group: ProcessGroup, pieces: list[torch.Tensor], root: int, timeout: Timeout | None) -> None:
    if pieces:
        group.broadcast(pieces, root, timeout=timeout)


def _require_entries(entries: list[Any] | None, count: int, call: str, name: str, what: str) -> None:
    if not isinstance(entries, list) or len(entries) != count:
        seen = f"has {len(entries)} entries" if isinstance(entries, list) else f"is {type(entries).__name__}"
        raise ValueError(f"{call}: {name} {seen}; it must be a list of {count}, {what}")
