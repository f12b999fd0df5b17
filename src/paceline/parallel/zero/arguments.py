"""The arguments of ZeroRedundancyOptimizer: which ones it refuses, and what must be the same on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.group.process_group import ProcessGroup
from paceline.parallel.agreement import require_same_module
from paceline.parallel.broadcast import broadcast_tensors
from paceline.parallel.conditions import rank_facts
from paceline.parallel.health.replicas import ReplicaCheck
from paceline.parallel.health.settings import choose_checks
from paceline.parallel.tracked_tensors import TrackedTensors

Stage = Literal[1, 2, 3]


def require_fit(group: ProcessGroup, stage: int, module: nn.Module | None, optimizer_class: type[Optimizer]) -> None:
    """Requires arguments that ZeroRedundancyOptimizer can work with.

    Raises:
        ValueError: `stage` is not 1, 2 or 3, or is 3 without a module.
        TypeError: the optimizer evaluates the loss several times in a step.
    """
    me = f"rank {group.me.rank}"
    if stage not in get_args(Stage):
        raise ValueError(
            f"{me}: stage is {stage!r}; it must be 1 to shard the optimizer's state, 2 to shard the gradients too, or "
            "3 to shard the parameters as well"
        )
    if stage == 3 and module is None:
        raise ValueError(
            f"{me}: stage=3 gathers parameters layer by layer and needs the module; pass the module as params, or as "
            "module="
        )
    require_one_evaluation(optimizer_class, group)


def require_one_evaluation(optimizer_class: type[Optimizer], group: ProcessGroup) -> None:
    """Requires an optimizer that can be divided among ranks.

    Raises:
        TypeError: the optimizer evaluates the loss several times in a step.
    """
    if inspect.signature(optimizer_class.step).parameters["closure"].default is inspect.Parameter.empty:
        raise TypeError(
            f"rank {group.me.rank}: {optimizer_class.__name__} evaluates the loss several times in a step, for which "
            "it needs all parameters together; pass an optimizer_class that updates each parameter independently, "
            "such as AdamW"
        )


def start_alike(
    module: nn.Module | None,
    param_groups: Sequence[dict[str, Any]],
    arguments: Mapping[str, object],
    group: ProcessGroup,
    problem: Exception | None = None,
) -> None:
    """Compares the ranks' parameters and arguments, and copies rank 0's parameters and buffers to all ranks.

    Args:
        module: the module, if it is known.
        param_groups: the optimizer's groups.
        arguments: what else must be the same on every rank.
        group: the ranks.
        problem: why this rank cannot start; it is raised once the others know.

    Raises:
        CollectiveMismatchError: parameters or arguments differ; raised on every rank.
    """
    params = [param for param_group in param_groups for param in param_group["params"]]
    names = {} if module is None else {id(param): name for name, param in module.named_parameters()}
    named = {
        names.get(id(param), f"number {at}"): nn.Parameter(param.detach(), param.requires_grad)
        for at, param in enumerate(params)
        if problem is None
    }
    tracked = TrackedTensors(trained=named, frozen={}, buffers={}, sparse=frozenset(), ignored=frozenset())
    options: dict[str, object] = {
        **arguments,
        "checks": str(choose_checks(None)),
        "groups": [len(param_group["params"]) for param_group in param_groups],
    }
    require_same_module(tracked, options, rank_facts(group, False), problem, group)
    everything = {id(param): param for param in params}
    if module is not None:
        everything.update({id(each): each for each in (*module.parameters(), *module.buffers())})
    broadcast_tensors([tensor.data for tensor in everything.values()], group)


def replica_check(module: nn.Module | None, params: Sequence[torch.Tensor], group: ProcessGroup) -> ReplicaCheck | None:
    """Returns what compares the ranks' copies of the parameters that the optimizer has; None if it is switched off.

    The state of the optimizer is not compared, since each rank holds a part of its own.
    """
    checks = choose_checks(None)
    if module is None or not checks.are_on or group.size() == 1:
        return None
    own = {id(param) for param in params}
    others = [name for name, param in module.named_parameters() if id(param) not in own]
    check = ReplicaCheck(module, others, group, checks.every)
    check.compares_optimizers = False
    return check
