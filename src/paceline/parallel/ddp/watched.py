"""Checks between forwards whether a wrapped module was changed, and copies its buffers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from paceline.group.buffers import is_plain
from paceline.group.process_group import ProcessGroup
from paceline.parallel.broadcast import broadcast_tensors, by_device, byte_views
from paceline.parallel.ddp.structure import ModuleStructure
from paceline.parallel.tracked_tensors import collect_tracked

_CHECK_EVERY = 16  # forwards


class WatchedModule:
    """A wrapped module; its attribute `tracked` has the tensors that the module had when it was wrapped."""

    def __init__(self, module: nn.Module, group: ProcessGroup, also_ignored: Iterable[str] = ()) -> None:
        self.tracked = collect_tracked(module, also_ignored)
        self._module = module
        self._group = group
        self._structure = ModuleStructure(module, self.tracked.ignored)
        self._forwards = 0
        self._buffers_sent: list[tuple[int, int]] = []  # where their values are, and the number of bytes there
        self._buffer_bytes: list[list[torch.Tensor]] = []  # byte views, for each device

    def check_unchanged(self) -> None:
        """Checks at every 16th call that the module has not been changed.

        Raises:
            RuntimeError: parameters or submodules were replaced or added, or a parameter was unfrozen.
        """
        self._forwards += 1
        if self._forwards % _CHECK_EVERY != 1:
            return
        if not self._structure.is_unchanged():
            raise RuntimeError(
                f"{self._me()}: the module changed after wrapping: parameters or submodules were added, removed or "
                f"replaced{self._structure.change_text()}, and the gradients of new ones would not be averaged over "
                "the ranks. Change the module first and wrap it afterwards (again, if need be)"
            )
        for name, param in self.tracked.frozen.items():
            if param.requires_grad:
                raise RuntimeError(
                    f"{self._me()}: parameter {name!r} did not require a gradient when the module was wrapped and does "
                    "now; its gradient would not be averaged over the ranks. Unfreeze parameters first and wrap the "
                    "module afterwards (again, if need be)"
                )

    def current_tensors(self, with_buffers: bool) -> list[torch.Tensor]:
        """Returns the module's present parameters, and its buffers if asked for, since they may have been replaced."""
        return collect_tracked(self._module, self.tracked.ignored).tensors(with_buffers)

    def current_buffers(self) -> list[torch.Tensor]:
        """Returns the buffers that `send_buffers` would copy."""
        return self._structure.buffers()

    def has_buffers(self) -> bool:
        """Returns whether the module has buffers that `send_buffers` would copy."""
        return bool(self.current_buffers())

    def send_buffers(self, root: int) -> None:
        """Copies the root's buffers to all ranks."""
        # Not `detach()`, which would count writes for autograd: as in torch, another forward before the backward is no
        # error, though batch normalization keeps its statistics for the backward.
        buffers = [buffer.data for buffer in self._structure.buffers()]
        if not buffers:
            return
        if not all(map(is_plain, buffers)):
            broadcast_tensors(buffers, self._group, root)
            return
        # A buffer may become a longer view of the same memory; of plain ones, nothing else has to be compared.
        memory = [(buffer.data_ptr(), buffer.nbytes) for buffer in buffers]
        if memory != self._buffers_sent:
            self._buffer_bytes = [byte_views(together) for together in by_device(buffers)]
            self._buffers_sent = memory
        for views in self._buffer_bytes:
            self._group.broadcast(views, root)

    def _me(self) -> str:
        return f"rank {self._group.me.rank}"
