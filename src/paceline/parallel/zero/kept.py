"""What an optimizer keeps for what a rank updates: of which type, and in which memory.

An optimizer may update copies of the parameters in a type with more digits ("master weights", Micikevicius et al. 2018,
"Mixed Precision Training"), from which the parameters are rounded. It may have these copies and its state in the memory
of the CPU while the parameters are on a GPU, or in a file (Ren et al. 2021, "ZeRO-Offload"; Rajbhandari et al. 2021,
"ZeRO-Infinity").
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from paceline.parallel.zero.file_memory import FileMemory
from paceline.parallel.zero.shards import Shard

MASTER = "master"
"""The name of the copy of a parameter in the state of the optimizer, as it is saved."""

_CPU = "cpu"


class Kept:
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
