"""`PinnedMemory`: host memory with which an accelerator exchanges data without the processor, and the copies.

The copies are enqueued on the calling thread's current stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paceline import _core
from paceline.comm.engine.adapters.device_streams import copy_pieces

_NO_FLAGS = 0
_MANY = 8  # pieces that are worth a kernel which makes them one, so that one copy moves them


class PinnedMemory:
    """Host memory for copies, pinned where the device's module can do that, until `close` is called.

    Args:
        nbytes: the size.
        device: the device that copies.
        is_shared: whether to share the memory with the other ranks of the host if it can be pinned then, as it can for
            CUDA. The core reduces such memory without another copy.

    Attributes:
        bytes: the memory as a flat tensor of uint8.
    """

    def __init__(self, nbytes: int, device: torch.device, is_shared: bool) -> None:
        self._registered = False
        if is_shared and device.type == "cuda":
            self.bytes = _core.shared_tensor(nbytes)
            self._registered = int(_cuda().cudaHostRegister(self.bytes.data_ptr(), nbytes, _NO_FLAGS)) == 0
        if not self._registered:  # a limit on locked memory may forbid it for memory that is not CUDA's own
            self.bytes = pinned_bytes(nbytes, device)

    def close(self) -> None:
        """Releases the memory, which no copy may use any more; idempotent."""
        if self._registered:
            self._registered = False
            _cuda().cudaHostUnregister(self.bytes.data_ptr())
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")


def pinned_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns `nbytes` bytes from PyTorch's cache of pinned memory, or ordinary memory if the device has none."""
    if device.type == "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:  # this includes NotImplementedError
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def copy_to_host(host: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Enqueues the copy of device memory to host memory.

    Args:
        host: the host memory, as bytes.
        parts: the device memory, as bytes in one or more tensors, as long as `host` together.
    """
    if len(parts) > _MANY:
        parts = [torch.cat(list(parts))]
    for target, part in _side_by_side(host, parts):
        target.copy_(part, non_blocking=True)


def copy_to_device(parts: Sequence[torch.Tensor], host: torch.Tensor) -> None:
    """Enqueues the copy of host memory to device memory; the arguments are those of `copy_to_host`."""
    if len(parts) > _MANY:
        whole = torch.empty(host.numel(), dtype=torch.uint8, device=parts[0].device)
        whole.copy_(host, non_blocking=True)
        copy_pieces(parts, [source for source, _ in _side_by_side(whole, parts)])
        return
    for source, part in _side_by_side(host, parts):
        part.copy_(source, non_blocking=True)


def _side_by_side(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the bytes of `whole` for each part, with the part."""
    at = 0
    for part in parts:
        yield whole[at : at + part.numel()], part
        at += part.numel()


def _cuda() -> Any:
    return torch.cuda.cudart()
