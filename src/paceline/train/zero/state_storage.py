"""StateStorage: selects the dtype and memory of a rank's optimizer state.

An optimizer may update higher-precision copies of the parameters ("master weights", Micikevicius et al. 2018, "Mixed
Precision Training"), and round the copies to obtain the parameters. The copies and the state can be offloaded from a
GPU to CPU memory, or to a memory-mapped file (Ren et al. 2021, "ZeRO-Offload"; Rajbhandari et al. 2021,
"ZeRO-Infinity").
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from paceline.train.module_tensors import pinned_like
from paceline.train.zero.shards import Shard

MASTER = "master"
"""The key of a parameter's master copy in a saved optimizer state."""

_CPU = "cpu"
_CHUNK_NBYTES = 16 << 20  # small tensors are allocated from chunks of this size
_ALIGNMENT_NBYTES = 64


class FileMemory:
    """Allocates tensors in an unnamed memory-mapped file, which the kernel frees even if the process is killed.

    Disk space is reserved in advance, because a write to mapped memory cannot report a full disk. The
    constructor and `zeros` raise OSError if they fail; the message contains `me`, a description of this rank.
    """

    def __init__(self, directory: str | os.PathLike[str], me: str) -> None:
        self._directory, self._me = os.fspath(directory), me
        try:
            self._file = tempfile.TemporaryFile(dir=self._directory, prefix="paceline-optimizer-")  # noqa: SIM115
        except OSError as error:
            raise OSError(
                error.errno,
                f"{me}: offload: no file can be created in {self._directory}: {error.strerror}; pass a directory on a "
                "local disk that this process may write to",
            ) from error
        weakref.finalize(self, self._file.close)
        self._nbytes = 0
        self._mappings: list[tuple[int, int]] = []  # the start and end addresses of each mapping
        self._chunk = torch.empty(0, dtype=torch.uint8, device="cpu")  # the unused remainder of the last chunk

    @property
    def nbytes(self) -> int:
        """The size of the file in bytes."""
        return self._nbytes

    def zeros(self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocates a dense tensor of zeros in the file."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        room = -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        if self._chunk.numel() < room:
            self._chunk = self._mapped(max(room, _CHUNK_NBYTES))
        memory, self._chunk = self._chunk[:nbytes], self._chunk[room:]
        return memory.view(dtype).as_strided(shape, strides)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns True if a tensor's memory is in the file."""
        address = tensor.data_ptr()
        return tensor.is_cpu and any(start <= address < stop for start, stop in self._mappings)

    def _mapped(self, nbytes: int) -> torch.Tensor:
        length = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._file.fileno(), self._nbytes, length)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._me}: offload: the optimizer needs {length / 1e6:.0f} MB more in {self._directory}, in "
                f"addition to {self._nbytes / 1e6:.0f} MB that it has: {error.strerror}; free some space, or pass "
                "another directory",
            ) from error
        mapped = mmap.mmap(self._file.fileno(), length, mmap.MAP_SHARED, offset=self._nbytes)
        self._nbytes += length
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._mappings.append((memory.data_ptr(), memory.data_ptr() + length))
        return memory


class StateStorage:
    """Allocates memory for an optimizer's state and its master copies of parameters.

    Methods that allocate memory raise OSError if the disk is full.

    Args:
        dtype: the dtype of the master copies. If None, the optimizer updates the parameters themselves.
        offload: "cpu", or a directory for a memory-mapped file. If None, the state is kept on the parameters' device.
        me: a description of this rank for error messages.
    """

    def __init__(self, dtype: torch.dtype | None, offload: str | os.PathLike[str] | None, me: str) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"{me}: master_dtype is {dtype}; it must be a floating-point type such as torch.float32")
        self._dtype, self._offload, self._me = dtype, offload, me
        self._file: FileMemory | None = None
        self._tensors: dict[tuple[int, object], torch.Tensor] = {}  # state tensors in the file, by parameter id and key

    @property
    def arguments(self) -> dict[str, object]:
        """The settings that must be the same on every rank; directories may differ."""
        offload = self._offload if self._offload in (None, _CPU) else "a directory"
        return {"master_dtype": str(self._dtype), "offload": offload}

    def open(self, params: Iterable[torch.Tensor]) -> Exception | None:
        """Creates the file if needed; returns an error if this fails or the settings do not suit the parameters."""
        if self._offload == _CPU and any(param.is_cpu for param in params):
            return ValueError(
                f"{self._me}: offload='cpu' has no meaning for parameters that are on the CPU; pass a directory to "
                "keep the optimizer's state in a file"
            )
        try:
            if self._offload is not None and self._offload != _CPU:
                self._file = FileMemory(self._offload, self._me)
        except OSError as error:
            return error
        return None

    def copies(self, param: torch.Tensor) -> bool:
        """Returns True if the optimizer updates a master copy of the parameter."""
        return self._dtype_for(param) != param.dtype or (self._offload is not None and not param.is_cpu)

    def make_masters(self, shards: Iterable[Shard]) -> None:
        """Creates master copies for this rank's shards where needed."""
        for shard in shards:
            updated = shard.updated
            if updated is not None and shard.is_mine and shard.master is None and self.copies(updated):
                copy = self._like(updated, self._dtype_for(updated))
                with torch.no_grad():
                    copy.copy_(updated)
                shard.master = nn.Parameter(copy, updated.requires_grad)
                if self._offload == _CPU:
                    shard.pinned = pinned_like(updated)

    def gradient_device(self, params: Sequence[torch.Tensor]) -> torch.device:
        """Returns the device of the gradients that the optimizer uses, or the first one if there are several."""
        return torch.device(_CPU) if self._offload is not None else params[0].device

    def step(self, inner: Optimizer) -> None:
        """Steps the optimizer; if there is a file, new state is allocated in it."""
        if self._file is None:
            inner.step()
            return
        updated = [param for group in inner.param_groups for param in group["params"]]
        is_new = any(param.grad is not None and not inner.state.get(param) for param in updated)
        with _FileAllocationMode(self._file, updated) if is_new else nullcontext():
            inner.step()
        self.settle(inner)

    def settle(self, inner: Optimizer) -> None:
        """Moves state that is not in the file, for example after loading, into the file, if there is one."""
        if self._file is None:
            return
        for updated, values in inner.state.items():
            for key, value in values.items():
                if not isinstance(value, torch.Tensor) or value.shape != updated.shape or value.ndim == 0:
                    continue
                if not self._file.holds(value) and value.numel():
                    tensor = self._tensors.get((id(updated), key))
                    if tensor is None or tensor.dtype != value.dtype:
                        tensor = self._like(updated, value.dtype)
                    values[key] = tensor.copy_(value)
                self._tensors[id(updated), key] = values[key]

    def _dtype_for(self, updated: torch.Tensor) -> torch.dtype:
        wide = self._dtype
        if wide is None or not updated.is_floating_point() or updated.dtype.itemsize >= wide.itemsize:
            return updated.dtype
        return wide

    def _like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Allocates a tensor with the layout of `tensor` in the file or on the state's device."""
        strides = torch.empty_like(tensor, device="meta").stride()
        if self._file is not None:
            return self._file.zeros(tensor.shape, strides, dtype)
        device = tensor.device if self._offload is None else torch.device(_CPU)
        return torch.empty_strided(tensor.shape, strides, dtype=dtype, device=device)


class _FileAllocationMode(TorchFunctionMode):
    """Allocates in a file the state that an optimizer creates by calling `zeros_like` on its parameters."""

    def __init__(self, memory: FileMemory, updated: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._memory = memory
        self._updated = set(map(id, updated))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros_like and args and id(args[0]) in self._updated:
            strides = torch.empty_like(args[0], device="meta").stride()
            return self._memory.zeros(args[0].shape, strides, kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


def state_of_shard(shard: Shard, inner: Optimizer) -> dict[str, object]:
    """Returns an optimizer's state for a shard, with the master copy if its dtype differs from the parameter's."""
    target = shard.target
    assert target is not None
    state = dict(inner.state.get(target, {}))
    if shard.master is not None and shard.master.dtype != shard.param.dtype:
        state[MASTER] = shard.master.detach()
    return state


@torch.no_grad()
def load_masters(states: Mapping[int, dict[str, Any]], shards: Sequence[Shard]) -> None:
    """Moves master copies from `states`, whose keys are indices into `shards`, into the shards.

    If a state lacks a master copy, the next step initializes the copy from the parameter.
    """
    for number, state in states.items():
        loaded = state.pop(MASTER, None)
        master = shards[number].master
        if isinstance(loaded, torch.Tensor) and master is not None:
            master.copy_(loaded.view(master.shape))
