"""Creates tensors in memory that the ranks of a host share."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from paceline import _core
from paceline.descriptors import is_shortage, out_of_descriptors


def empty_shared(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns an uninitialised CPU tensor that `all_reduce` reduces in place for all ranks, without a staging copy.

    This pays off for large tensors (a megabyte and up) that every rank creates this way and passes to `all_reduce`
    whole. Everywhere else it is an ordinary tensor, of `dtype` (default: PyTorch's default type) and shape `size`.

    After an `all_reduce` of it has failed because a rank died, did not come or aborted the group, it is an ordinary
    tensor: the others may still write to the memory that it had, so it was moved to memory of its own, at the same
    address. It can be used on, with any group; for the speed, make a new one.

    Raises:
        MemoryError: the system has not enough shared memory left.
        OutOfDescriptorsError: the process has no file descriptor left; each such tensor takes one.

    >>> empty_shared(2, 3).shape
    torch.Size([2, 3])
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    first = size[0] if size else ()
    shape = torch.Size(first if isinstance(first, Sequence) else [each for each in size if isinstance(each, int)])
    nbytes = shape.numel() * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    try:
        return _core.shared_tensor(nbytes).view(dtype).view(shape)
    except MemoryError:
        raise MemoryError(f"empty_shared: the system has no {nbytes:,} bytes of shared memory left") from None
    except OSError as error:
        if not is_shortage(error):
            raise
        rank = os.environ.get("RANK")
        who = f"process {os.getpid()}" if rank is None else f"rank {rank} (pid {os.getpid()})"
        raise out_of_descriptors(who, "a shared tensor (empty_shared)") from error
