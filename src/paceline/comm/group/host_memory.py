"""Memory shared by the ranks on a host: tensors for `all_reduce`, and blocks for other parts of Paceline."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import torch

from paceline import _core
from paceline.comm.engine.native.engine import HostRanks, NativeGroup
from paceline.comm.group.process_group import ProcessGroup
from paceline.linux import is_out_of_descriptors, out_of_descriptors_error


def empty_shared(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns an uninitialized CPU tensor in shared memory, which `all_reduce` reduces without a staging copy.

    It is useful for large tensors (about a megabyte or more) that every rank creates with this function and passes to
    `all_reduce` as a whole. In all other respects the result is an ordinary tensor of `dtype` (default: PyTorch's
    default dtype) and shape `size`.

    If an `all_reduce` of the tensor fails because a rank died, timed out or aborted the group, other ranks might still
    write to the shared memory. The tensor is then moved to private memory at the same address and becomes an ordinary
    tensor. It remains usable with any group; create a new shared tensor to restore the speed.

    Raises:
        MemoryError: the system has too little shared memory left.
        OutOfDescriptorsError: the process has no file descriptors left; each shared tensor uses one.

    >>> empty_shared(2, 3).shape
    torch.Size([2, 3])
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    first = size[0] if size else ()
    shape = torch.Size(first if isinstance(first, Sequence) else [length for length in size if isinstance(length, int)])
    if any(length < 0 for length in shape):
        raise ValueError(f"empty_shared: the size is {tuple(shape)}; no dimension may be negative")
    nbytes = shape.numel() * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    try:
        return _core.shared_tensor(nbytes).view(dtype).view(shape)
    except MemoryError:
        raise MemoryError(f"empty_shared: the system does not have {nbytes:,} bytes of shared memory left") from None
    except OSError as error:
        if not is_out_of_descriptors(error):
            raise
        rank = os.environ.get("RANK")
        who = f"process {os.getpid()}" if rank is None else f"rank {rank} (pid {os.getpid()})"
        raise out_of_descriptors_error(who, "a shared tensor (empty_shared)") from error


def host_ranks(group: ProcessGroup) -> HostRanks | None:
    """Returns the ranks on this rank's host, or None if the group's engine does not connect them with shared memory."""
    opened = group.on_cpu
    return opened.host_ranks if isinstance(opened, NativeGroup) else None


def applies_updates(group: ProcessGroup) -> bool:
    """Returns True if `group.reduce_scatter_memory` can apply an optimizer update to the results."""
    opened = group.on_cpu
    return isinstance(opened, NativeGroup) and isinstance(opened.channel, _core.HostGroup)


def share_on_host(group: ProcessGroup, nbytes: int) -> _core.SharedMemory:
    """Allocates `nbytes` bytes of zeroed memory shared by the ranks on this host; all ranks in `group` must call this.

    `host_ranks(group)` must not be None. If any rank has too few descriptors or too little memory, all ranks raise an
    error.
    """
    ranks = host_ranks(group)
    assert ranks is not None
    owner = ranks.here[0]
    memory, number = None, 0
    problem: Exception | None = None
    if owner == ranks.rank:
        try:
            memory, number = ranks.share(nbytes)
        except OSError as error:
            problem = _shortage(error, group, nbytes)
    numbers = _exchange(group, number, problem)
    if memory is None:
        try:
            memory = ranks.find(owner, numbers[owner], nbytes, group.timeout_ns / 1e9)
        except OSError as error:
            problem = _shortage(error, group, nbytes)
        if memory is None and problem is None:
            problem = MemoryError(f"{group.me}: the memory that rank {group.ranks[owner]} shares was not received")
    _exchange(group, 0, problem)
    if owner == ranks.rank:
        ranks.withdraw(number)
    assert memory is not None
    return memory


def _shortage(error: OSError, group: ProcessGroup, nbytes: int) -> Exception:
    if is_out_of_descriptors(error):
        return out_of_descriptors_error(str(group.me), "memory that it shares with the other ranks of its host")
    return MemoryError(f"{group.me}: the system does not have {nbytes:,} bytes of shared memory left ({error})")


def _exchange(group: ProcessGroup, number: int, problem: Exception | None) -> list[int]:
    """Returns every rank's `number`, in rank order; if any rank passes a `problem`, raises an error on all ranks."""
    mine = json.dumps([number, str(problem) if problem else None]).encode()
    from_all = [json.loads(data) for data in group.all_gather_bytes(mine)]
    if problem is not None:
        raise problem
    for _, other in from_all:
        if other is not None:
            raise MemoryError(f"{group.me}: another rank cannot share memory, so no rank can: {other}")
    return [number_of_rank for number_of_rank, _ in from_all]
