"""ModuleMonitor: detects changes to a wrapped module between forward passes, and copies its buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain

import torch
from torch import nn

from paceline.comm.group.buffers import is_plain
from paceline.comm.group.process_group import ProcessGroup
from paceline.train.module_tensors import broadcast_bytes, broadcast_tensors, by_device, byte_views, collect_tracked


class ModuleStructure:
    """Records the parameters and submodules of a module at construction, or at the latest call to `accept`.

    `is_unchanged` compares objects by identity in C, which takes about 0.1 ms for a module with 400 layers. Iterating
    over `parameters()` takes several times as long. `buffers` excludes those in `ignored_buffers`.
    """

    def __init__(self, module: nn.Module, ignored_buffers: Collection[str] = ()) -> None:
        self._module = module
        self._ignored_names = frozenset(ignored_buffers)
        self._ignored: list[tuple[nn.Module, str]] = []
        self._buffer_members: list[torch.Tensor | None] = []
        self._buffers: list[torch.Tensor] = []
        self.accept()

    def accept(self) -> None:
        """Records the module's current parameters and submodules as the reference for `is_unchanged`."""
        modules = list(self._module.modules())
        tables = [table for module in modules for table in (module._parameters, module._modules)]
        self._tables = [table for table in tables if table]
        # A later entry in one of these empty tables is a new parameter or submodule.
        self._empty = [table for table in tables if not table]
        self._members = self._list_members()
        self._ids = [id(member) for member in self._members]
        self._buffer_tables = [module._buffers for module in modules]
        # A renamed layer keeps the buffers that were ignored under its former name.
        self._ignored += [
            (module, key)
            for prefix, module in self._module.named_modules(remove_duplicate=False)
            for key, _ in module._buffers.items()  # in a scripted module, `_buffers` is not a dict but has `items`
            if (f"{prefix}.{key}" if prefix else key) in self._ignored_names
        ]
        self._buffer_members.clear()

    def _list_members(self) -> list[nn.Parameter | nn.Module | None]:
        return list(chain.from_iterable(table.values() for table in self._tables))

    def is_unchanged(self) -> bool:
        """Returns True if all recorded parameters and submodules are still the same objects, and none were added."""
        return not any(self._empty) and self._ids == list(map(id, self._list_members()))

    def buffers(self) -> list[torch.Tensor]:
        """Returns the module's current buffers without duplicates, ignored buffers or meta buffers."""
        members = list(chain.from_iterable(table.values() for table in self._buffer_tables))
        if len(members) != len(self._buffer_members) or any(
            now is not before for now, before in zip(members, self._buffer_members, strict=True)
        ):
            self._buffer_members = members
            kept = {id(buffer): buffer for buffer in members if buffer is not None and not buffer.is_meta}
            for owner, key in self._ignored:
                kept.pop(id(getattr(owner, key, None)), None)
            self._buffers = list(kept.values())
        return self._buffers


_CHECK_EVERY = 16  # the number of forward passes between two checks of the module


class ModuleMonitor:
    """Compares a wrapped module with the tensors that it had when it was wrapped, and copies its buffers between ranks.

    The tensors in `also_ignored` are ignored in addition to those that the module lists. If `may_leave_out` is True,
    some parameters may receive no gradient; parameters may then also be removed from the module.
    """

    def __init__(
        self, module: nn.Module, group: ProcessGroup, also_ignored: Iterable[str], *, may_leave_out: bool
    ) -> None:
        self.tracked = collect_tracked(module, also_ignored)
        self._may_leave_out = may_leave_out
        self._module = module
        self._group = group
        self._known = {id(param): param for param in module.parameters()}  # including ignored parameters
        self._untrained: dict[str, nn.Parameter] = dict(self.tracked.frozen)
        self._structure = ModuleStructure(module, self.tracked.ignored)
        self._forwards = 0
        self._buffers_sent: list[tuple[int, int]] = []  # each buffer's address and size in bytes
        self._buffer_bytes: list[list[torch.Tensor]] = []  # byte views of the buffers, by device

    def check_unchanged(self) -> None:
        """Checks on every 16th call that the module still trains the same parameters; other changes are allowed.

        Raises:
            RuntimeError: parameters were replaced, added or removed, or a parameter was unfrozen.
        """
        self._forwards += 1
        if self._forwards % _CHECK_EVERY != 1:
            return
        for name, param in self._untrained.items():
            if param.requires_grad:
                raise RuntimeError(
                    f"{self._me()}: parameter {name!r} did not require a gradient when the module was wrapped and does "
                    "now; its gradient would not be averaged over the ranks. Unfreeze parameters first and wrap the "
                    "module afterwards (again, if necessary)"
                )
        if not self._structure.is_unchanged():
            self._accept_change()

    def _accept_change(self) -> None:
        """Records the module's current structure, or raises an error if the trained parameters have changed."""
        named = dict(self._module.named_parameters())
        if not all(isinstance(param, nn.Parameter) for param in named.values()):
            return  # torch.func.functional_call replaces parameters by tensors during one call; they pass gradients on
        unknown = {
            name: param
            for name, param in named.items()
            if id(param) not in self._known and name not in self.tracked.ignored
        }
        new = [name for name, param in unknown.items() if param.requires_grad]
        kept = set(map(id, named.values()))
        gone = [name for name, param in self.tracked.trained.items() if id(param) not in kept and name not in new]
        if gone and not any(param.requires_grad for param in named.values()):
            return  # torch.func.functional_call replaces all parameters for an evaluation; there is nothing to average
        if new or (gone and not self._may_leave_out):
            changes = [f"new: {', '.join(new[:5])}"] if new else []
            changes += [f"gone: {', '.join(gone[:5])}"] if gone else []
            raise RuntimeError(
                f"{self._me()}: the module changed after wrapping: parameters were added, removed or replaced "
                f"({'; '.join(changes)}), and the gradients of new ones would not be averaged over the ranks. Change "
                "the module first and wrap it afterwards (again, if necessary)"
            )
        self._untrained.update(unknown)
        self._structure.accept()

    def current_tensors(self, with_buffers: bool) -> list[torch.Tensor]:
        """Returns the module's current parameters and optionally its buffers, including replaced tensors."""
        return collect_tracked(self._module, self.tracked.ignored).tensors(with_buffers)

    def current_buffers(self) -> list[torch.Tensor]:
        """Returns the buffers that `send_buffers` copies, including those of new layers."""
        if not self._structure.is_unchanged():
            self._accept_change()
        return self._structure.buffers()

    def send_buffers(self, root: int) -> None:
        """Copies the root's buffers to all ranks."""
        # Writes through `data` do not increment the version counter. Therefore, as in torch, a second forward pass
        # before the backward pass raises no error, even though batch normalization has saved its statistics for the
        # backward pass.
        buffers = [buffer.data for buffer in self.current_buffers()]
        if not buffers:
            return
        if not all(map(is_plain, buffers)):
            broadcast_tensors(buffers, self._group, root)
            return
        # Address and size identify a plain buffer; the size matters because a buffer may become a longer view.
        memory = [(buffer.data_ptr(), buffer.nbytes) for buffer in buffers]
        if memory != self._buffers_sent:
            self._buffer_bytes = [byte_views(together) for together in by_device(buffers)]
            self._buffers_sent = memory
        for views in self._buffer_bytes:
            broadcast_bytes(views, self._group, root)

    def _me(self) -> str:
        return f"rank {self._group.me.rank}"
