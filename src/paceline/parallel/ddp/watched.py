"""A wrapped module between its forwards: whether it was changed, and its buffers."""

from __future__ import annotations

import torch
from torch import nn

from paceline.group.process_group import ProcessGroup
from paceline.parallel.ddp.agreement import broadcast_tensors, by_device, byte_views
from paceline.parallel.ddp.members import find_members
from paceline.parallel.ddp.structure import ModuleStructure

_LOOK_AGAIN_EVERY = 16  # forwards, whether the module was changed


class WatchedModule:
    """The members of `module` as they were when this was made."""

    def __init__(self, module: nn.Module, group: ProcessGroup) -> None:
        self.members = find_members(module)
        self._group = group
        self._structure = ModuleStructure(module, self.members.ignored)
        self._forwards = 0
        self._buffers_sent: list[int] = []
        self._buffer_bytes: list[list[torch.Tensor]] = []  # of each device

    def look(self) -> None:
        """Raises, every few calls, if the module was changed.

        Raises:
            RuntimeError: parameters or submodules are others, or a parameter was unfrozen.
        """
        self._forwards += 1
        if self._forwards % _LOOK_AGAIN_EVERY != 1:
            return
        if not self._structure.is_unchanged():
            raise RuntimeError(
                f"{self._me()}: the module changed after wrapping: parameters or submodules were added, removed or "
                f"replaced{self._structure.say_change()}, and the new ones would not be averaged over the ranks. "
                "Change the module first, then wrap it (again, if need be)"
            )
        for name, param in self.members.frozen.items():
            if param.requires_grad:
                raise RuntimeError(
                    f"{self._me()}: parameter {name!r} did not require a gradient when the module was wrapped and does "
                    "now; it would not be averaged over the ranks. Unfreeze parameters first, then wrap the module "
                    "(again, if need be)"
                )

    def has_buffers(self) -> bool:
        """Whether there is anything for `send_buffers` to do."""
        return bool(self._structure.buffers())

    def send_buffers(self, root: int) -> None:
        """Copies the root's buffers to all ranks."""
        buffers = self._structure.buffers()
        if not buffers:
            return
        addresses = [buffer.data_ptr() for buffer in buffers]
        if addresses != self._buffers_sent:
            if not all(buffer.is_contiguous() for buffer in buffers):
                broadcast_tensors(buffers, self._group, root)
                return
            self._buffer_bytes = [byte_views(together) for together in by_device(buffers)]
            self._buffers_sent = addresses
        for views in self._buffer_bytes:
            self._group.broadcast(views, root)

    def _me(self) -> str:
        return f"rank {self._group.me.rank}"
