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
    """A wrapped module; its attribute `tracked` has the tensors that the module had when it was wrapped.

    Args:
        module: the module.
        group: the ranks.
        also_ignored: the names of tensors that are left alone besides those that the module names.
        may_leave_out: whether parameters may get no gradient, and so may also be taken out of the module.
    """

    def __init__(
        self, module: nn.Module, group: ProcessGroup, also_ignored: Iterable[str] = (), *, may_leave_out: bool = False
    ) -> None:
        self.tracked = collect_tracked(module, also_ignored)
        self._may_leave_out = may_leave_out
        self._module = module
        self._group = group
        self._known = {id(param): param for param in module.parameters()}  # those that are ignored, too
        self._untrained: dict[str, nn.Parameter] = dict(self.tracked.frozen)
        self._structure = ModuleStructure(module, self.tracked.ignored)
        self._forwards = 0
        self._buffers_sent: list[tuple[int, int]] = []  # where their values are, and the number of bytes there
        self._buffer_bytes: list[list[torch.Tensor]] = []  # byte views, for each device

    def check_unchanged(self) -> None:
        """Checks at every 16th call that what the module trains has not been changed; all else may change.

        Raises:
            RuntimeError: parameters were replaced, added or taken out, or a parameter was unfrozen.
        """
        self._forwards += 1
        if self._forwards % _CHECK_EVERY != 1:
            return
        for name, param in self._untrained.items():
            if param.requires_grad:
                raise RuntimeError(
                    f"{self._me()}: parameter {name!r} did not require a gradient when the module was wrapped and does "
                    "now; its gradient would not be averaged over the ranks. Unfreeze parameters first and wrap the "
                    "module afterwards (again, if need be)"
                )
        if not self._structure.is_unchanged():
            self._accept_change()

    def _accept_change(self) -> None:
        """Takes the module as it is now for unchanged, if it trains the same parameters as before."""
        now = {id(param): name for name, param in self._module.named_parameters()}
        unknown = {
            name: param
            for name, param in self._module.named_parameters()
            if id(param) not in self._known and name not in self.tracked.ignored
        }
        new = [name for name, param in unknown.items() if param.requires_grad]
        gone = [name for name, param in self.tracked.trained.items() if id(param) not in now and name not in new]
        if new or (gone and not self._may_leave_out):
            told = [f"new: {', '.join(new[:5])}"] if new else []
            told += [f"gone: {', '.join(gone[:5])}"] if gone else []
            raise RuntimeError(
                f"{self._me()}: the module changed after wrapping: parameters were added, removed or replaced "
                f"({'; '.join(told)}), and the gradients of new ones would not be averaged over the ranks. Change the "
                "module first and wrap it afterwards (again, if need be)"
            )
        self._untrained.update(unknown)
        self._structure.accept()

    def current_tensors(self, with_buffers: bool) -> list[torch.Tensor]:
        """Returns the module's present parameters, and its buffers if asked for, since they may have been replaced."""
        return collect_tracked(self._module, self.tracked.ignored).tensors(with_buffers)

    def current_buffers(self) -> list[torch.Tensor]:
        """Returns the buffers that `send_buffers` would copy, also those of layers that are new."""
        if not self._structure.is_unchanged():
            self._accept_change()
        return self._structure.buffers()

    def has_buffers(self) -> bool:
        """Returns whether the module has buffers that `send_buffers` would copy."""
        return bool(self.current_buffers())

    def send_buffers(self, root: int) -> None:
        """Copies the root's buffers to all ranks."""
        # Not `detach()`, which would count writes for autograd: as in torch, another forward before the backward is no
        # error, though batch normalization keeps its statistics for the backward.
        buffers = [buffer.data for buffer in self.current_buffers()]
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
