"""PartitionedOptimizer: base class for optimizers that are divided among ranks; checks of their arguments.

Each rank runs an inner optimizer on the shards that it owns. Saved states are whole, in the format of the unsharded
optimizer.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.comm.group.process_group import ProcessGroup
from paceline.errors import short_repr
from paceline.train.checks.check_settings import choose_checks
from paceline.train.checks.replica_check import ReplicaCheck
from paceline.train.join import Joinable, JoinHook
from paceline.train.module_tensors import TrackedTensors, broadcast_tensors
from paceline.train.preconditions import rank_facts, require_same_module
from paceline.train.zero.optimizer_state import (
    StateByIndex,
    copy_options,
    gather_state,
    join_parts,
    load_optimizer,
    options_of,
    part_of_state_dict,
    state_dict_of_parts,
    to_state_dict,
)
from paceline.train.zero.shards import Shard, Shards
from paceline.train.zero.state_storage import load_masters, state_of_shard

Stage = Literal[1, 2, 3]


def require_fit(group: ProcessGroup, stage: int, module: nn.Module | None, optimizer_class: type[Optimizer]) -> None:
    """Checks the stage, the module and the inner optimizer class for a ZeroRedundancyOptimizer."""
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
    devices = [] if module is None else list(dict.fromkeys(param.device for param in module.parameters()))
    if stage == 3 and len(devices) > 1:
        raise ValueError(
            f"{me}: stage=3 got a module with parameters on {' and '.join(map(str, devices))}; autograd would gather "
            "and reduce the layers of several devices in another order on each rank. Use stage=2, or one device per "
            "rank"
        )
    require_one_evaluation(optimizer_class, group)


def require_one_evaluation(optimizer_class: type[Optimizer], group: ProcessGroup) -> None:
    """Checks that an optimizer can be divided among ranks."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            f"rank {group.me.rank}: optimizer_class is {short_repr(optimizer_class)}; it must be a class derived from "
            "torch.optim.Optimizer, such as torch.optim.AdamW, whose arguments follow"
        )
    if inspect.signature(optimizer_class.step).parameters["closure"].default is inspect.Parameter.empty:
        raise TypeError(
            f"rank {group.me.rank}: {optimizer_class.__name__} evaluates the loss several times in a step, for which "
            "it needs all parameters together; pass an optimizer_class that updates each parameter independently, "
            "such as AdamW"
        )


def synchronize_parameters(
    module: nn.Module | None,
    param_groups: Sequence[dict[str, Any]],
    arguments: Mapping[str, object],
    group: ProcessGroup,
    problem: Exception | None = None,
) -> None:
    """Compares parameters and `arguments` across ranks, and copies rank 0's parameters and buffers to all ranks.

    If `module` is None, only the groups' parameters are copied. An error in `problem`, which keeps this rank from
    starting, is raised after all ranks have received it. If anything differs, every rank raises
    CollectiveMismatchError.
    """
    params = [param for param_group in param_groups for param in param_group["params"]]
    names = {} if module is None else {id(param): name for name, param in module.named_parameters()}
    named = {
        names.get(id(param), f"number {index}"): nn.Parameter(param.detach(), param.requires_grad)
        for index, param in enumerate(params)
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
        everything.update({id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})
    broadcast_tensors([tensor.data for tensor in everything.values()], group)


def replica_check(module: nn.Module | None, params: Sequence[torch.Tensor], group: ProcessGroup) -> ReplicaCheck | None:
    """Creates the check that compares the ranks' copies of the optimizer's parameters, or returns None.

    No check is needed if there is no module, if checks are off, or if the group has one rank. The check does not
    compare the optimizer's state, because each rank holds a different part of it.
    """
    checks = choose_checks(None)
    if module is None or not checks.are_on or group.size() == 1:
        return None
    own = {id(param) for param in params}
    others = [name for name, param in module.named_parameters() if id(param) not in own]
    check = ReplicaCheck(module, others, group, checks.every)
    check.compares_optimizers = False
    return check


class PartitionedJoinHook(JoinHook):
    """Participates in the other ranks' steps on a rank that has run out of inputs."""

    def __init__(self, optimizer: PartitionedOptimizer, by_initial: bool) -> None:
        self._optimizer = optimizer
        optimizer._divide_by_initial(by_initial)

    def main_hook(self) -> None:
        """Runs a step without gradients from this rank."""
        self._optimizer._step_without_inputs()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Restores the divisor. Parameters need no copy, because they are equal on all ranks after every step."""
        self._optimizer._divide_by_initial(True)


class PartitionedOptimizer(Optimizer, Joinable):
    """Base class for optimizers that run an inner optimizer on the shards that this rank owns."""

    process_group: ProcessGroup
    _shards: Shards
    _inner: Optimizer | None = None
    _consolidated: StateByIndex | None = None
    is_scaled_alike = False  # whether the GradScaler in use checks the gradients on all ranks

    @property
    @abstractmethod
    def owns_gradients(self) -> bool:
        """Whether a shard's averaged gradient exists only on the owner of the shard."""

    @abstractmethod
    def own_part(self) -> Optimizer:
        """Returns the inner optimizer, which holds this rank's parameters and averaged gradients."""

    @abstractmethod
    def _step_without_inputs(self) -> None:
        """Performs a step to which this rank contributes no gradients."""

    @abstractmethod
    def _divide_by_initial(self, divides: bool) -> None:
        """Sets the divisor for averages within `Join`: the number of all ranks, or the number of ranks with inputs."""

    def _make_inner(self, optimizer_class: Callable[..., Optimizer], defaults: dict[str, Any]) -> Optimizer:
        """Creates the inner optimizer for this rank's shards, and exposes its state and options."""
        self._inner = optimizer_class([self._part_of(group) for group in self.param_groups], **defaults)
        self.defaults = self._inner.defaults
        self.state = self._inner.state
        copy_options(self._inner.param_groups, self.param_groups)
        return self._inner

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch's GradScaler sets `found_inf` before it calls `step`; `step` can then reject the scaler."""
        return self.owns_gradients and not self.is_scaled_alike

    def _require_own_scaler(self, option: str) -> None:
        if self._step_supports_amp_scaling and hasattr(self, "found_inf"):
            raise TypeError(
                f"rank {self.process_group.me.rank}: torch.amp.GradScaler checks only this rank's part of the "
                f"gradients {option}, so the ranks would skip different steps; use paceline.GradScaler"
            )

    @property
    def join_device(self) -> torch.device:
        """Returns the device of the parameters."""
        return self._params()[0].device

    @property
    def join_process_group(self) -> ProcessGroup:
        """Returns the process group of the optimizer."""
        return self.process_group

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Returns the hook for `Join`; accepts `divide_by_initial_world_size`."""
        return PartitionedJoinHook(self, bool(kwargs.get("divide_by_initial_world_size", True)))

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers the whole state on group rank `to`, where `state_dict` then returns it; all ranks must call it.

        The gathered tensors are on the CPU, regardless of the device of the parameters.
        """
        gathered = gather_state(self._own_state(), self.process_group, to)
        self._consolidated = None if gathered is None else join_parts(gathered, self._shards.by_param)

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state on the rank that gathered it, in the format of the unsharded optimizer.

        Raises:
            RuntimeError: `consolidate_state_dict` has not been called since the last step, or has gathered the state on
                a different rank.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self.process_group.me.rank}: the optimizer's state is still sharded. Call "
                "consolidate_state_dict(to=0) on every rank after the last step, and then state_dict() on rank 0"
            )
        return to_state_dict(self.param_groups, self._consolidated)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a whole state, from a sharded or an unsharded optimizer; every rank keeps its own part.

        Raises:
            ValueError: the state has different parameter groups.
        """
        self._load(part_of_state_dict(state_dict, self.param_groups, self._shards.by_param))

    def own_parts(self) -> Iterator[tuple[int, Shard, Mapping[str, object]]]:
        """Yields, for each shard that this rank updates, the parameter's index, the shard and its state.

        If each host has a copy of the model, several ranks update the same shard, but only one of these ranks stores
        the shard's state.
        """
        states = self._own_state()
        number = 0
        for index, shards in enumerate(self._shards.by_param):
            for shard in shards:
                if shard.is_mine:
                    yield index, shard, states.get(number, {})
                number += 1

    def gradient_holders(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields, for each shard that this rank updates, the parameter and the tensor that holds its gradient."""
        for shard in self._shards.mine():
            if shard.updated is not None:
                yield shard.param, shard.updated

    def load_own_parts(self, groups: Sequence[dict[str, Any]], states: Sequence[Mapping[str, object]]) -> None:
        """Loads group options, and shard states in the order of `own_parts`.

        Raises:
            ValueError: `groups` and this optimizer's groups contain different numbers of parameters.
        """
        self._load(state_dict_of_parts(groups, states, self.param_groups, self._shards.by_param))

    def _load(self, part: dict[str, Any]) -> Optimizer:
        """Loads a state into the inner optimizer, and returns that optimizer."""
        assert self._inner is not None
        own = {id(shard.target): shard for shard in self._shards.mine()}
        targets = [target for group in self._inner.param_groups for target in group["params"]]
        load_masters(part["state"], [own[id(target)] for target in targets])
        load_optimizer(self._inner, part)
        self.state = self._inner.state
        self._consolidated = None
        copy_options(self._inner.param_groups, self.param_groups)
        return self._inner

    def _own_state(self) -> dict[int, dict[str, object]]:
        """Returns the states of the shards that this rank updates, by shard number."""
        assert self._inner is not None
        states: dict[int, dict[str, object]] = {}
        for number, shard in enumerate(self._shards.all()):
            if shard.is_mine and shard.target is not None and (state := state_of_shard(shard, self._inner)):
                states[number] = state
        return states

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _part_of(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of a parameter group that contains only the tensors that this rank updates."""
        return {**options_of(group), "params": self._shards.mine_of(group["params"])}
