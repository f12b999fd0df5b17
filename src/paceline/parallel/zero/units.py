"""Decides which parameters of a module are gathered together (ZeRO stage 3)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Unit:
    """A module, and the parameters that it needs while its forward or its backward runs."""

    name: str
    module: nn.Module
    params: tuple[torch.Tensor, ...]


def find_units(module: nn.Module, params: Collection[torch.Tensor]) -> list[Unit]:
    """Returns a unit for each element of `nn.Sequential`, `nn.ModuleList` or `nn.ModuleDict`, and for the module.

    Those elements are the layers of a model, which are called one after the other. A unit within another one keeps its
    parameters to itself. All other parameters, and those that several units share, belong to the unit of the whole
    module: they are present while any code runs that may read them.

    Args:
        module: the model.
        params: the parameters to be divided among units; others are left out.
    """
    wanted = {id(param) for param in params}
    layers: dict[int, tuple[str, nn.Module]] = {}
    for name, container in module.named_modules():
        if isinstance(container, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            for child, layer in container.named_children():
                if not isinstance(layer, (nn.ModuleList, nn.ModuleDict)):  # these have no forward
                    layers.setdefault(id(layer), (f"{name}.{child}".lstrip("."), layer))
    layers.pop(id(module), None)

    homes: dict[int, set[int]] = {}
    found: dict[int, torch.Tensor] = {}

    def visit(current: nn.Module, home: int) -> None:
        home = id(current) if id(current) in layers else home
        for param in current.parameters(recurse=False):
            if id(param) in wanted:
                homes.setdefault(id(param), set()).add(home)
                found[id(param)] = param
        for part in current.children():
            visit(part, home)

    visit(module, id(module))
    members: dict[int, list[torch.Tensor]] = {home: [] for home in layers}
    members[id(module)] = []
    for key, param in found.items():
        among = homes[key]
        members[min(among) if len(among) == 1 else id(module)].append(param)
    layers[id(module)] = ("", module)
    return [Unit(*layers[home], tuple(members[home])) for home in members if members[home]]


def buckets_of_units(units: Sequence[Unit], trained: Sequence[torch.Tensor]) -> list[list[int]]:
    """Returns for each unit the indices in `trained` of its parameters, whose gradients are averaged together."""
    index_of = {id(param): at for at, param in enumerate(trained)}
    return [[index_of[id(param)] for param in unit.params if id(param) in index_of] for unit in units]


def names_of(params: Sequence[torch.Tensor], module: nn.Module | None) -> list[str]:
    """Returns the names that the module gives these parameters, or numbers if they are not known to be in one."""
    known = {} if module is None else {id(param): name for name, param in module.named_parameters()}
    return [known.get(id(param), f"parameter {at}") for at, param in enumerate(params)]
