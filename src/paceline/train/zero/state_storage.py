"""What an optimizer keeps for what a rank updates: of which type, and in which memory.

An optimizer may update copies of the parameters in a type with more digits ("master weights", Micikevicius et al. 2018,
"Mixed Precision Training"), from which the parameters are rounded. It may have these copies and its state in the memory
of the CPU while the parameters are on a GPU, or in a file (Ren et al. 2021, "ZeRO-Offload"; Rajbhandari et al. 2021,
"ZeRO-Infinity").

Memory for tensors in a file, of which the system keeps in memory what it has room for.
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

from paceline.train.zero.shards import Shard

_CHUNK_NBYTES = 16 << 20  # that small tensors share
_ALIGNMENT_NBYTES = 64


class FileMemory:
    """Tensors that lie in a file, which has no name, so that nothing is left behind however the process ends.

    The disk's space is reserved before it is used: a write to memory could not report that the disk is full.

    Args:
        directory: where the file is made.
        me: this rank, for messages.

    Raises:
        OSError: a file cannot be made there.
    """

    def __init__(self, directory: str | os.PathLike[str], me: str) -> None:
        self._directory, self._me = os.fspath(directory), me
        try:
            self._file = tempfile.TemporaryFile(dir=self._directory, prefix="paceline-optimizer-")  # noqa: SIM115
        except OSError as error:
            raise OSError(
                error.errno,
                f"{me}: offload: no file can be made in {self._directory}: {error.strerror}; give a directory on a "
                "local disk that this process may write to",
            ) from error
        weakref.finalize(self, self._file.close)
        self._nbytes = 0
        self._mappings: list[tuple[int, int]] = []  # the addresses at which they begin and end
        self._chunk = torch.empty(0, dtype=torch.uint8, device="cpu")  # the rest of the last one

    @property
    def nbytes(self) -> int:
        """How large the file is."""
        return self._nbytes

    def zeros(self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of zeros in the file, whose elements fill its memory.

        Raises:
            OSError: the disk has no room.
        """
        nbytes = prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        room = -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        if self._chunk.numel() < room:
            self._chunk = self._mapped(max(room, _CHUNK_NBYTES))
        memory, self._chunk = self._chunk[:nbytes], self._chunk[room:]
        return memory.view(dtype).as_strided(shape, strides)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor lies in the file."""
        address = tensor.data_ptr()
        return tensor.is_cpu and any(start <= address < stop for start, stop in self._mappings)

    def _mapped(self, nbytes: int) -> torch.Tensor:
        length = -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._file.fileno(), self._nbytes, length)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._me}: offload: the optimizer needs {length / 1e6:.0f} MB more in {self._directory}, besides "
                f"{self._nbytes / 1e6:.0f} MB that it has: {error.strerror}; make room, or give another directory",
            ) from error
        mapped = mmap.mmap(self._file.fileno(), length, mmap.MAP_SHARED, offset=self._nbytes)
        self._nbytes += length
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._mappings.append((memory.data_ptr(), memory.data_ptr() + length))
        return memory


MASTER = "master"
"""The name of the copy of a parameter in the state of the optimizer, as it is saved."""

_CPU = "cpu"


class StateStorage:
    """How an optimizer keeps its copies of parameters and its state.

    Args:
        dtype: the type of the copies; None to update the parameters themselves.
        offload: `"cpu"`, or a directory for the file; None to keep the state where the parameters are.
        me: this rank, for messages.

    Raises:
        TypeError: `dtype` is not a type of floating-point numbers.
    """

    def __init__(self, dtype: torch.dtype | None, offload: str | os.PathLike[str] | None, me: str) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"{me}: master_dtype is {dtype}; it must be a floating-point type such as torch.float32")
        self._dtype, self._offload, self._me = dtype, offload, me
        self._file: FileMemory | None = None
        self._places: dict[tuple[int, object], torch.Tensor] = {}  # of the state in the file

    @property
    def arguments(self) -> dict[str, object]:
        """What must be the same on every rank; each may have a directory of its own."""
        where = self._offload if self._offload in (None, _CPU) else "a directory"
        return {"master_dtype": str(self._dtype), "offload": where}

    def problem(self, params: Iterable[torch.Tensor]) -> Exception | None:
        """Makes the file, if there is to be one; returns why this rank cannot keep anything for these parameters."""
        if self._offload == _CPU and any(each.is_cpu for each in params):
            return ValueError(
                f"{self._me}: offload='cpu' has no meaning for parameters that are on the CPU; give a directory, to "
                "keep the optimizer's state in a file"
            )
        try:
            if self._offload is not None and self._offload != _CPU:
                self._file = FileMemory(self._offload, self._me)
        except OSError as error:
            return error
        return None

    def copies(self, param: torch.Tensor) -> bool:
        """Returns whether the optimizer updates a copy of a parameter."""
        return self._dtype_for(param) != param.dtype or (self._offload is not None and not param.is_cpu)

    def make_masters(self, shards: Iterable[Shard]) -> None:
        """Gives each shard that this rank updates a copy, where it needs one.

        Raises:
            OSError: the disk is full.
        """
        for shard in shards:
            updated = shard.updated
            if updated is not None and shard.is_mine and shard.master is None and self.copies(updated):
                copy = self._like(updated, self._dtype_for(updated))
                with torch.no_grad():
                    copy.copy_(updated)
                shard.master = nn.Parameter(copy, updated.requires_grad)

    def step(self, inner: Optimizer) -> None:
        """Has the optimizer step, and make its state in the file, if there is one.

        Raises:
            OSError: the disk is full.
        """
        if self._file is None:
            inner.step()
            return
        updated = [each for group in inner.param_groups for each in group["params"]]
        is_new = any(each.grad is not None and not inner.state.get(each) for each in updated)
        with _MakingIn(self._file, updated) if is_new else nullcontext():
            inner.step()
        self.settle(inner)

    def settle(self, inner: Optimizer) -> None:
        """Moves what the optimizer has made elsewhere, such as by loading it, into the file, if there is one.

        Raises:
            OSError: the disk is full.
        """
        if self._file is None:
            return
        for updated, values in inner.state.items():
            for key, value in values.items():
                if not isinstance(value, torch.Tensor) or value.shape != updated.shape or value.ndim == 0:
                    continue
                if not self._file.holds(value) and value.numel():
                    known = self._places.get((id(updated), key))
                    has_room = known is not None and known.dtype == value.dtype
                    place = known if known is not None and has_room else self._like(updated, value.dtype)
                    values[key] = place.copy_(value)
                self._places[id(updated), key] = values[key]

    def _dtype_for(self, updated: torch.Tensor) -> torch.dtype:
        has_fewer_digits = (
            self._dtype is not None and updated.is_floating_point() and updated.dtype.itemsize < self._dtype.itemsize
        )
        return self._dtype if has_fewer_digits and self._dtype is not None else updated.dtype

    def _like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor with this one's layout where the optimizer's state is kept."""
        strides = torch.empty_like(tensor, device="meta").stride()
        if self._file is not None:
            return self._file.zeros(tensor.shape, strides, dtype)
        device = tensor.device if self._offload is None else torch.device(_CPU)
        return torch.empty_strided(tensor.shape, strides, dtype=dtype, device=device)


class _MakingIn(TorchFunctionMode):
    """Has zeros like something that an optimizer updates made in a file, as optimizers make their state."""

    def __init__(self, memory: FileMemory, updated: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._memory = memory
        self._updated = {id(each) for each in updated}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros_like and args and id(args[0]) in self._updated:
            strides = torch.empty_like(args[0], device="meta").stride()
            return self._memory.zeros(args[0].shape, strides, kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


def state_of_shard(shard: Shard, inner: Optimizer) -> dict[str, object]:
    """Returns what an optimizer keeps for a shard, with the copy of the parameter if that has more digits."""
    target = shard.target
    assert target is not None
    state = dict(inner.state.get(target, {}))
    if shard.master is not None and shard.master.dtype != shard.param.dtype:
        state[MASTER] = shard.master.detach()
    return state


@torch.no_grad()
def load_masters(states: Mapping[int, dict[str, Any]], shards: Sequence[Shard]) -> None:
    """Takes the copies of parameters out of states that are to be loaded, into the shards in the same order.

    A shard whose state has none takes its parameter's value when the optimizer steps next.
    """
    for number, state in states.items():
        loaded = state.pop(MASTER, None)
        master = shards[number].master
        if isinstance(loaded, torch.Tensor) and master is not None:
            master.copy_(loaded.view(master.shape))
