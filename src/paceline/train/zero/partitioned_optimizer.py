"""What optimizers that are divided among the ranks have in common: their state, and how it is saved and loaded.

The arguments of ZeroRedundancyOptimizer: which ones it refuses, and what must be the same on every rank.
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
from paceline.train.checks.check_settings import choose_checks
from paceline.train.checks.replica_check import ReplicaCheck
from paceline.train.join import Joinable
from paceline.train.module_tensors import TrackedTensors, broadcast_tensors
from paceline.train.preconditions import rank_facts, require_same_module
from paceline.train.zero.optimizer_state import (
    StateByIndex,
    copy_options,
    gather_state,
    join_parts,
    load_optimizer,
    part_of_group,
    part_of_state_dict,
    state_dict_of_parts,
    to_state_dict,
)
from paceline.train.zero.shards import Shard, Shards
from paceline.train.zero.state_storage import load_masters, state_of_shard

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


def synchronize_parameters(
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


class PartitionedOptimizer(Optimizer, Joinable):
    """An optimizer of which each rank of `process_group` runs the part `_inner`, for the shards that it owns."""

    process_group: ProcessGroup
    _shards: Shards
    _inner: Optimizer | None = None
    _consolidated: StateByIndex | None = None
    is_scaled_alike = False  # whether a GradScaler that checks all ranks for infinities is stepping it

    @property
    @abstractmethod
    def owns_gradients(self) -> bool:
        """Whether only the owner of a shard has its averaged gradient."""

    @abstractmethod
    def own_part(self) -> Optimizer:
        """Returns the inner optimizer, with this rank's part of the parameters and of the averaged gradients."""

    def _make_inner(self, optimizer_class: Callable[..., Optimizer], defaults: dict[str, Any]) -> None:
        """Makes the optimizer of what this rank updates, whose state and options become this one's."""
        self._inner = optimizer_class([self._part_of(group) for group in self.param_groups], **defaults)
        self.defaults = self._inner.defaults
        self.state = self._inner.state
        copy_options(self._inner.param_groups, self.param_groups)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Makes torch's GradScaler pass what it found to `step`, which can then refuse the scaler."""
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
        """Returns the ranks that take part."""
        return self.process_group

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers the whole state on rank `to` of the group, where `state_dict` returns it; every rank calls this."""
        gathered = gather_state(self._own_state(), self.process_group, to)
        self._consolidated = None if gathered is None else join_parts(gathered, self._shards.by_param)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that the unsharded optimizer would have, which it can load; on one rank only.

        Raises:
            RuntimeError: `consolidate_state_dict` was not called since the last step, or with another rank.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self.process_group.me.rank}: the optimizer's state is still sharded. Call "
                "consolidate_state_dict(to=0) on every rank after the last step, and then state_dict() on rank 0"
            )
        return to_state_dict(self.param_groups, self._consolidated)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the whole state of this optimizer or an unsharded one; every rank loads it and keeps its part.

        Raises:
            ValueError: the state has different parameter groups.
        """
        self._load(part_of_state_dict(state_dict, self.param_groups, self._shards.by_param))

    def own_parts(self) -> Iterator[tuple[int, Shard, Mapping[str, object]]]:
        """Yields the shards that this rank updates, each with its parameter's number and the state that it has.

        Of several ranks that update the same, as on several hosts with one copy of the model each, one has states here.
        """
        states = self._own_state()
        number = 0
        for place, shards in enumerate(self._shards.by_param):
            for shard in shards:
                if shard.is_mine:
                    yield place, shard, states.get(number, {})
                number += 1

    def gradient_holders(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the parameters that this rank updates a part of, each with the tensor that has the part's gradient."""
        for shard in self._shards.mine():
            if shard.updated is not None:
                yield shard.param, shard.updated

    def load_own_parts(self, groups: Sequence[dict[str, Any]], states: Sequence[Mapping[str, object]]) -> None:
        """Loads the options of the groups, and the states of the shards that `own_parts` yields.

        Raises:
            ValueError: the groups have other numbers of parameters.
        """
        self._load(state_dict_of_parts(groups, states, self.param_groups, self._shards.by_param))

    def _load(self, part: dict[str, Any]) -> None:
        """Loads what the inner optimizer must load."""
        assert self._inner is not None
        own = {id(s.target): s for s in self._shards.mine()}
        targets = [each for group in self._inner.param_groups for each in group["params"]]
        load_masters(part["state"], [own[id(each)] for each in targets])
        load_optimizer(self._inner, part)
        self.state = self._inner.state
        self._consolidated = None
        copy_options(self._inner.param_groups, self.param_groups)

    def _own_state(self) -> dict[int, dict[str, object]]:
        """Returns the state of the shards that this rank updates, by their numbers."""
        assert self._inner is not None
        states: dict[int, dict[str, object]] = {}
        for number, shard in enumerate(self._shards.all()):
            if shard.is_mine and shard.target is not None and (state := state_of_shard(shard, self._inner)):
                states[number] = state
        return states

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _part_of(self, group: dict[str, Any]) -> dict[str, Any]:
        """Returns the group with only what this rank updates of its parameters."""
        return part_of_group(group, self._shards.mine_of(group["params"]))
