"""Detects that a module was changed, fast enough for regular checks during training."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

import torch
from torch import nn


class ModuleStructure:
    """The parameters and submodules that a module had when this was created.

    It compares identities in code that runs in C, which takes about 0.1 ms for a module of 400 layers. To iterate over
    `parameters()` takes several times as long.
    """

    def __init__(self, module: nn.Module, ignored_buffers: Collection[str] = ()) -> None:
        modules = list(module.modules())
        self._module = module
        self._names = {id(param): name for name, param in module.named_parameters(remove_duplicate=False)}
        self._ignored = [
            (each._buffers, key)
            for prefix, each in module.named_modules(remove_duplicate=False)
            for key in each._buffers
            if (f"{prefix}.{key}" if prefix else key) in ignored_buffers
        ]
        self._tables: list[dict[str, nn.Parameter | None] | dict[str, nn.Module | None]] = []
        self._tables += [each._parameters for each in modules if each._parameters]
        self._tables += [each._modules for each in modules if each._modules]
        # Layers without parameters or submodules may get some later, so these tables must stay empty.
        self._empty: list[dict[str, nn.Parameter | None] | dict[str, nn.Module | None]] = []
        self._empty += [each._parameters for each in modules if not each._parameters]
        self._empty += [each._modules for each in modules if not each._modules]
        self._buffer_tables = [each._buffers for each in modules if each._buffers]
        self._members = self._list_members()
        self._ids = [id(member) for member in self._members]
        self._buffer_members: list[torch.Tensor | None] = []
        self._buffers: list[torch.Tensor] = []

    def _list_members(self) -> list[nn.Parameter | nn.Module | None]:
        return list(chain.from_iterable(table.values() for table in self._tables))

    def is_unchanged(self) -> bool:
        """Returns whether every parameter and submodule is still the same object, and none was added."""
        return not any(self._empty) and self._ids == list(map(id, self._list_members()))

    def change_text(self) -> str:
        """Returns a text for an error that lists the parameters which have changed."""
        now = {id(param): name for name, param in self._module.named_parameters(remove_duplicate=False)}
        new = [name for key, name in now.items() if key not in self._names]
        gone = [name for key, name in self._names.items() if key not in now and name not in new]
        told = [f"new: {', '.join(new[:5])}"] if new else []
        told += [f"gone: {', '.join(gone[:5])}"] if gone else []
        return f" ({'; '.join(told)})" if told else ""

    def buffers(self) -> list[torch.Tensor]:
        """Returns the module's buffers that are not ignored, each once; the module may replace them at any time."""
        members = list(chain.from_iterable(table.values() for table in self._buffer_tables))
        if len(members) != len(self._buffer_members) or any(
            now is not before for now, before in zip(members, self._buffer_members, strict=True)
        ):
            self._buffer_members = members
            kept = {id(each): each for each in members if each is not None}
            for table, key in self._ignored:
                kept.pop(id(table.get(key)), None)
            self._buffers = list(kept.values())
        return self._buffers
