"""Divides a model among the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from paceline.group.default import Group, resolve
from paceline.group.device_mesh import DeviceMesh
from paceline.group.process_group import ProcessGroup
from paceline.parallel.broadcast import broadcast_tensors
from paceline.parallel.tensor.slices import divided, slice_of
from paceline.parallel.tensor.styles import ParallelStyle


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | ProcessGroup | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Divides modules of `module` in place, as a plan says; all ranks call this with the same model and plan.

    Args:
        module: the whole model, with the same weights on every rank unless `src_data_rank` is a rank.
        device_mesh: a mesh of one dimension, such as `mesh["tp"]`, or a group; the default group if None.
        parallelize_plan: a style for `module` itself, or styles by the names of its modules, in which `*` stands for
            one part of a name: `{"layers.*.mlp.up": ColwiseParallel()}`.
        src_data_rank: the rank in the group whose weights are divided, as in torch; None takes each rank's own.

    Returns:
        `module`. `parameters()` are then this rank's parts, so make optimizers afterwards.

    Raises:
        ValueError: a name of the plan is in no module, or the mesh has several dimensions.
        TypeError: a style does not fit its module.
    """
    group = _group_of(device_mesh)
    if parallelize_plan is None:
        return module
    if src_data_rank is not None:
        broadcast_tensors([*module.parameters(), *module.buffers()], group, src_data_rank)
    plan = parallelize_plan if isinstance(parallelize_plan, Mapping) else {"": parallelize_plan}
    parts: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}  # tied weights stay tied

    def divide(parameter: torch.Tensor, dim: int) -> nn.Parameter:
        if (already := slice_of(parameter)) is not None:
            raise ValueError(
                f"parallelize_module: a weight is divided already, in dimension {already.dim}; divide it once"
            )
        if id(parameter) not in parts:
            parts[id(parameter)] = (parameter, divided(parameter, dim, group))
        part = parts[id(parameter)][1]
        mine = slice_of(part)
        if mine is None or mine.dim != dim:
            raise ValueError(
                "parallelize_module: two modules share a weight, and the plan divides it along different dimensions; "
                "choose styles that divide it alike, such as RowwiseParallel for an embedding and ColwiseParallel for "
                "the linear layer that it is tied to"
            )
        return part

    for pattern, style in plan.items():
        found = [(name, each) for name, each in module.named_modules() if _matches(name, pattern)]
        if not found:
            raise ValueError(
                f"parallelize_module: no module is called {pattern!r}; the names are those of model.named_modules()"
            )
        for name, each in found:
            style.apply(each, name, group, divide)
    return module


def _group_of(device_mesh: DeviceMesh | ProcessGroup | None) -> ProcessGroup:
    if isinstance(device_mesh, DeviceMesh):
        return device_mesh.get_group()
    group: Group = device_mesh
    chosen = resolve(group)
    if chosen is None:
        raise ValueError("parallelize_module: this rank is not in the group; call it on the ranks of the group only")
    return chosen


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))
