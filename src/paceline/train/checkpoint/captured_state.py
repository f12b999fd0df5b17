"""CapturedState: a rank's contribution to a checkpoint, before anything is copied or written.

`capture` creates it from the objects of a training loop. `RandomState` is an object that a state can contain.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.comm.engine.adapters.device_streams import accelerator_in_use, current_accelerator
from paceline.errors import short_repr
from paceline.train.checkpoint.format.values import join
from paceline.train.checkpoint.optimizers import Numbering
from paceline.train.checkpoint.pytree import Enclosing, enclosed, take_apart
from paceline.train.checkpoint.shard_layout import (
    LocalRegion,
    ParameterLayouts,
    ShardLayout,
    parameters_of,
    require_dense,
    require_fit,
    require_undivided,
    whole_of,
)
from paceline.train.data.loader import StatefulLoader
from paceline.train.ddp.distributed_data_parallel import DistributedDataParallel
from paceline.train.elastic.training_state import PendingGradients, Stateful
from paceline.train.elastic.worker.elastic_state import ElasticState
from paceline.train.gradient_use import GRADIENT_USE, is_pending
from paceline.train.logical_shards.logical_shards import LogicalShards
from paceline.train.logical_shards.shard_loader import ShardLoader
from paceline.train.module_tensors import is_compiled, synchronized_modules, uncompiled_key
from paceline.train.pipeline.pipeline import Pipeline
from paceline.train.zero.optimizer_state import to_state_dict
from paceline.train.zero.partitioned_optimizer import PartitionedOptimizer
from paceline.train.zero.sharded_parameters import ShardedParameters, sharded_parameters_of


@dataclass(frozen=True)
class CapturedObject:
    """The state of an object, which may differ between ranks.

    Attributes:
        is_everywhere: whether every rank has the object. False if only the ranks of a pipeline stage have it.
    """

    state: object
    value: object
    tensors: Mapping[str, torch.Tensor]
    is_everywhere: bool = True


@dataclass(frozen=True)
class CapturedReplica:
    """The state of a module or an optimizer that should be the same on every rank, although no wrapper ensures it.

    Attributes:
        state: the contribution to the checkpoint if the ranks do not differ.
        capture_own: a function that captures this rank's complete state under the given name, in case they do.
    """

    state: CapturedState
    capture_own: Callable[[str], CapturedState]


@dataclass
class CapturedState:
    """The state of a training loop on one rank.

    Attributes:
        is_first: whether this is rank 0, whose buffers and loader positions are saved.
        everywhere: the tensors that are the same on every rank.
        held: the tensor regions that only this rank contributes.
        offered: the tensor regions of a divided model that other ranks may also have.
        values: the plain values that are the same on every rank, or that only this rank has.
        objects: the objects that are compared between ranks, and saved separately for each rank if they differ.
        replicas: the modules and optimizers that are compared between ranks, and saved separately for each rank if they
            differ.
        layers: the names of this rank's layers and the total number of layers, by pipeline name.
    """

    is_first: bool = True
    everywhere: dict[str, torch.Tensor] = field(default_factory=dict)
    held: list[LocalRegion] = field(default_factory=list)
    offered: list[LocalRegion] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)
    objects: dict[str, CapturedObject] = field(default_factory=dict)
    replicas: dict[str, CapturedReplica] = field(default_factory=dict)
    layers: dict[str, tuple[list[str], int]] = field(default_factory=dict)
    layouts: ParameterLayouts = field(default_factory=ParameterLayouts)

    def is_on_first_rank(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Returns True if this is the first of the ranks among which `parallelize_module` divided these parameters.

        Only that rank contributes its ZeRO shards of the parameters that all of these ranks have undivided.
        """
        return all(self.layouts[parameter].is_on_first_rank for parameter in parameters)

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor that is the same on every rank."""
        require_dense(name, tensor)
        self.everywhere[name] = tensor.detach()

    def add_of_first(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor that may differ between ranks. The tensor on rank 0 is saved."""
        require_dense(name, tensor)
        if self.is_first:
            self.held.append(whole_of(name, tensor.detach()))

    def offer(self, held: LocalRegion, *, of_first: bool = False) -> None:
        """Adds a tensor region that other ranks may also have."""
        if _is_needed(held):
            self.offered.append(replace(held, of_first=of_first))

    def hold(self, held: Sequence[LocalRegion]) -> None:
        """Adds tensor regions that only this rank contributes."""
        self.held += filter(_is_needed, held)

    def add_tree(self, name: str, value: object) -> None:
        """Adds a tree of tensors and plain values that is the same on every rank."""
        self.everywhere |= {full: tensor.detach() for full, tensor in self.add_values(name, value).items()}

    def add_values(self, name: str, value: object) -> dict[str, torch.Tensor]:
        """Adds the plain values of a tree, and returns its tensors by name."""
        taken, tensors = _taken_apart(name, value)
        if not isinstance(value, torch.Tensor):
            self.values[name] = taken
        return tensors

    def hold_tree(self, name: str, value: object) -> None:
        """Adds a tree that only this rank contributes."""
        self.held += [whole_of(full, tensor.detach()) for full, tensor in self.add_values(name, value).items()]

    def add_state(self, other: CapturedState) -> None:
        """Adds the state of a replica that is the same on every rank."""
        self.everywhere |= other.everywhere
        self.held += other.held
        self.values |= other.values
        self.objects |= other.objects

    def hold_state(self, own: CapturedState) -> None:
        """Adds the complete state of a replica that this rank saves for itself."""
        self.held += [*own.held, *(whole_of(full, tensor) for full, tensor in own.everywhere.items())]
        self.values |= own.values
        for full, known in own.objects.items():
            self.hold_tree(full, known.state)

    def add_object(self, name: str, state: object, *, is_everywhere: bool = True) -> None:
        """Adds a tree that may differ between ranks."""
        self.objects[name] = CapturedObject(state, *_taken_apart(name, state), is_everywhere)


def _taken_apart(name: str, value: object) -> tuple[object, dict[str, torch.Tensor]]:
    """Separates the tensors in a tree from its plain values, and checks that a checkpoint can hold the tensors."""
    tensors: dict[str, torch.Tensor] = {}
    taken = take_apart(name, value, tensors)
    for full, tensor in tensors.items():
        require_dense(full, tensor)
    return taken, tensors


def _is_needed(held: LocalRegion) -> bool:
    """Returns True if a region must be saved. An empty region is saved only if the whole tensor is empty."""
    return held.nbytes > 0 or prod(held.shape) == 0


TrainingState = Mapping[str, Any]
Call = TypeVar("Call", bound=Callable[..., Any])
_NONE: Mapping[str, Numbering] = MappingProxyType({})
_NO_NAMES: Enclosing = MappingProxyType({})
_WRAPPERS = (DistributedDataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)


def takes_state_and_path(call: Call) -> Call:
    """Decorates a function that takes a state and a path: missing or swapped arguments raise a clear TypeError."""

    @wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if name in ("state", "path")}
        given.update(zip(("state", "path"), args, strict=False))
        name = call.__name__
        fault = _fault_of_order(given)
        if fault is not None:
            effect = "which loads into the objects in the state" if name == "load" else "which saves the state there"
            raise TypeError(
                f'{name} {fault}; it takes the state and then the path, as in {name}({{"model": model}}, '
                f'"checkpoints"), {effect}'
            )
        return call(*args, **kwargs)

    return cast(Call, checked)


def _fault_of_order(given: Mapping[str, object]) -> str | None:
    """Returns the reason why the arguments named "state" and "path" cannot be what their names say, or None."""
    if not given:
        return "got no state and no path"
    if len(given) == 1:
        (value,) = given.values()
        missing = "path" if "state" in given and not isinstance(value, (str, os.PathLike)) else "state"
        return f"got no {missing}, only {short_repr(value)}"
    state, path = given["state"], given["path"]
    if isinstance(state, (str, os.PathLike)):
        return f"got {short_repr(state)} as the state and {short_repr(path)} as the path"
    return None if isinstance(path, (str, os.PathLike)) else f"got {short_repr(path)} as the path"


def require_state(call: str, state: object, step: object = None) -> None:
    """Raises TypeError if the state given to a method of a checkpoint manager is a path, or the step is a state."""
    if isinstance(step, Mapping):
        raise TypeError(
            f"CheckpointManager.{call} got {short_repr(step)} as the step and {short_repr(state)} as the state; it "
            f'takes the step and then the state, as in manager.{call}(step, {{"model": model}})'
        )
    if isinstance(state, (str, os.PathLike)):
        raise TypeError(
            f"CheckpointManager.{call} got {short_repr(state)} as the state; the path belongs to "
            'CheckpointManager(path), and the state is a dict such as {"model": model, "optimizer": optimizer}'
        )


def require_path(path: object) -> None:
    """Raises TypeError if the argument to CheckpointManager is not a path."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"CheckpointManager got {short_repr(path)} as the path; pass the directory of the checkpoints here, and "
            "the state to its methods save and restore"
        )


def capture(state: TrainingState, is_first: bool, numberings: Mapping[str, Numbering] = _NONE) -> CapturedState:
    """Returns this rank's contribution to a checkpoint of `state`, without copying data.

    Args:
        is_first: whether this is rank 0, whose buffers and loader positions are saved.
        numberings: the numberings of the pipeline optimizers, by name.
    """
    into = CapturedState(is_first)
    found = list(entries(state))
    synchronized = _synchronized_parameters(value for _, value in found)
    for name, value in found:
        _capture(name, value, into, numberings.get(name), synchronized)
    return into


def _synchronized_parameters(values: Iterable[object]) -> set[int]:
    """Returns the ids of the parameters that a wrapper keeps the same on every rank.

    The wrapper may be torch's DistributedDataParallel, unless a communication hook averages the gradients.
    """
    modules = synchronized_modules()
    for value in values:
        while is_compiled(value):
            value = value._orig_mod  # type: ignore[attr-defined]
        if isinstance(value, nn.parallel.DistributedDataParallel) and not (
            value.parameters_to_ignore or value._comm_hooks
        ):
            modules.append(value.module)
    return {id(parameter) for module in modules for parameter in module.parameters()}


def entries(state: TrainingState, name: str = "", enclosing: Enclosing = _NO_NAMES) -> Iterator[tuple[str, Any]]:
    """Yields the objects and values in a state with their names, including those in dicts and in an ElasticState.

    `name` is the name of this state within the whole state, and `enclosing` contains the dicts that hold it.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"the state is a {type(state).__name__}; it must be a dict that maps names to objects, such as "
            '{"model": model, "optimizer": optimizer}'
        )
    inside = enclosed(name, state, enclosing)
    for key, value in state.items():
        if not isinstance(key, str) or not (key or name):
            raise TypeError(
                f"the state has the key {key!r} of type {type(key).__name__}; names must be non-empty strings"
            )
        inner = join(name, key)
        if isinstance(value, ElasticState):
            for full, part in entries(value.parts(), inner):
                require_undivided(full, module_of(part), part)
                yield full, part
            yield join(inner, "epoch"), value
        elif isinstance(value, dict) and holds_objects(value):
            yield from entries(value, inner, inside)
        else:
            yield inner, value


def holds_objects(value: dict[Any, Any]) -> bool:
    """Returns True if a dict contains not only plain values but also tensors or objects, which are loaded in place."""
    return any(isinstance(member, (torch.Tensor, Stateful, LogicalShards)) for member in _members(value))


def _members(state: Mapping[Any, Any]) -> Iterator[Any]:
    """Yields the members of a dict and its nested dicts, but not the nested dicts themselves; visits each dict once."""
    seen = {id(state)}
    pending = [state]
    while pending:
        for member in pending.pop().values():
            if not isinstance(member, dict):
                yield member
            elif id(member) not in seen:
                seen.add(id(member))
                pending.append(member)


def module_of(value: Any) -> nn.Module | None:
    """Returns the model inside any wrappers, or None if `value` is not a model.

    A compiled model is returned as is, because hooks and shared parameters may belong to it.
    """
    if isinstance(value, LogicalShards):
        value = value.module
    while isinstance(value, _WRAPPERS) or (is_compiled(value) and _is_wrapped(value)):
        value = value._orig_mod if is_compiled(value) else value.module
    return value if isinstance(value, nn.Module) else None


def _is_wrapped(value: Any) -> bool:
    while is_compiled(value):
        value = value._orig_mod
    return isinstance(value, (*_WRAPPERS, Pipeline))


def keys_in_whole(module: nn.Module) -> Set[str]:
    """Returns the `state_dict` keys that a module, or the undivided model of a `Pipeline`, has when not compiled."""
    if isinstance(module, Pipeline):
        return module.whole.keys
    return {uncompiled_key(module, key) for key in module.state_dict(keep_vars=True)}


def may_be_missing(value: object) -> bool:
    """Returns True if an object, such as pending gradients or a module without state, need not be in a checkpoint."""
    module = module_of(value)
    return isinstance(value, PendingGradients) or (module is not None and not keys_in_whole(module))


def key_in_whole(module: nn.Module, key: str) -> str:
    """Converts a key in a module's `state_dict` to the key in the undivided, uncompiled model."""
    key = uncompiled_key(module, key)
    return module.whole.key_of(key) if isinstance(module, Pipeline) else key


def _capture(
    name: str, value: object, into: CapturedState, numbering: Numbering | None, synchronized: Set[int]
) -> None:
    module = module_of(value)
    require_fit(name, module, value)
    if module is not None:
        if _may_differ(module, into, synchronized):
            _capture_replica(name, into, lambda own, state: _capture_module(own, module, state))
        else:
            _capture_module(name, module, into)
    elif isinstance(value, Optimizer):
        if numbering is None and _may_differ(value, into, synchronized):
            _capture_replica(name, into, lambda own, state: _capture_optimizer(own, value, state, None))
        else:
            _capture_optimizer(name, value, into, numbering)
    elif isinstance(value, (StatefulLoader, ShardLoader)):
        if into.is_first:  # rank 0's position is saved, even in the last step of an epoch
            into.values[name] = _only_plain(name, value.state_dict())
    elif isinstance(value, PendingGradients):
        if into.is_first:  # the gradients are the same on all workers
            into.hold_tree(name, value.state_dict())
    else:
        into.add_object(name, value.state_dict() if isinstance(value, Stateful) else value)


def _may_differ(value: nn.Module | Optimizer, into: CapturedState, synchronized: Set[int]) -> bool:
    """Returns True if each rank has all parameters of a module or an optimizer, and no wrapper keeps them the same."""
    if isinstance(value, (Pipeline, PartitionedOptimizer)):
        return False
    if isinstance(value, nn.Module) and sharded_parameters_of(value) is not None:
        return False
    parameters = parameters_of(value)
    return not all(id(parameter) in synchronized for parameter in parameters) and not any(
        into.layouts[parameter].is_divided for parameter in parameters
    )


def _capture_replica(name: str, into: CapturedState, capture_as: Callable[[str, CapturedState], None]) -> None:
    """Captures an object that is compared between ranks; `capture_as` adds it to a state under a given name."""

    def capture_own(own: str) -> CapturedState:
        state = CapturedState(layouts=into.layouts)
        capture_as(own, state)
        return state

    state = CapturedState(into.is_first, layouts=into.layouts)
    capture_as(name, state)
    into.replicas[name] = CapturedReplica(state, capture_own)


def _only_plain(name: str, state: object) -> object:
    value, tensors = _taken_apart(name, state)
    if tensors:
        raise TypeError(f"the state of {name!r} has tensors; the position of a loader must consist of plain values")
    return value


def _capture_module(name: str, module: nn.Module, into: CapturedState) -> None:
    sharded = sharded_parameters_of(module)
    is_pipeline = isinstance(module, Pipeline)
    if isinstance(module, Pipeline):
        into.layers[name] = [layer for layer, _ in module.named_children()], len(module.whole.names)
    if not keys_in_whole(module):
        into.values[name] = {}  # records the name of a module without state
    is_contributor = into.is_on_first_rank(module.parameters())
    for key, value in module.state_dict(keep_vars=True).items():
        full = join(name, key_in_whole(module, key))
        shards = None if sharded is None else sharded.shards_of(value)
        if shards is not None:
            for shard in shards:
                if (run := ShardedParameters.own_run(shard)) is None:
                    continue
                layout = ShardLayout.of_shard(shard)
                if is_contributor or layout.is_divided:
                    into.hold(layout.local_regions(full, run))
        elif isinstance(value, nn.Parameter):
            layout = into.layouts[value]
            if is_pipeline or layout.is_divided:
                require_dense(full, value)
                for region in layout.local_regions(full, value):
                    into.offer(region)
            else:
                into.add_tensor(full, value)
        elif not isinstance(value, torch.Tensor):
            into.add_object(full, value, is_everywhere=not is_pipeline)
        elif is_pipeline:
            require_dense(full, value)
            into.offer(whole_of(full, value.detach()), of_first=True)
        else:
            into.add_of_first(full, value)


def _capture_optimizer(name: str, optimizer: Optimizer, into: CapturedState, numbering: Numbering | None) -> None:
    """Adds an optimizer; `numbering` is None if the optimizer has all parameters of the model."""
    parameters = parameters_of(optimizer)
    numbers = list(range(len(parameters))) if numbering is None else list(chain(*numbering.of_own(optimizer)))
    if isinstance(optimizer, PartitionedOptimizer):
        _add_groups(name, to_state_dict(optimizer.param_groups, {})["param_groups"], into, numbering)
        _capture_partitioned(name, optimizer, into, numbers)
        return
    for key, value in optimizer.state_dict().items():
        if key == "param_groups":
            _add_groups(name, value, into, numbering)
        elif key != "state":
            into.add_tree(join(name, key), value)
        else:
            for index, values in value.items():
                is_known = isinstance(index, int) and index < len(parameters)
                layout, number = (into.layouts[parameters[index]], numbers[index]) if is_known else (None, index)
                full = join(name, "state", number)
                if not isinstance(values, Mapping) or not values:
                    into.add_tree(full, values)
                elif layout is not None and (numbering is not None or layout.is_divided):
                    for part, kept in values.items():
                        _offer(join(full, part), kept, layout, into)
                else:
                    for part, kept in values.items():
                        into.add_tree(join(full, part), kept)


def _add_groups(name: str, groups: list[dict[str, Any]], into: CapturedState, numbering: Numbering | None) -> None:
    into.add_tree(join(name, "param_groups"), groups if numbering is None else numbering.of_all(groups))


def _offer(name: str, value: object, layout: ShardLayout, into: CapturedState) -> None:
    """Adds an optimizer value for a parameter that is divided among ranks or exists only on some of the ranks."""
    for full, tensor in into.add_values(name, value).items():
        is_divided = layout.applies_to(tensor, full)
        for region in layout.local_regions(full, tensor) if is_divided else [whole_of(full, tensor.detach())]:
            into.offer(region)


def _capture_partitioned(name: str, optimizer: PartitionedOptimizer, into: CapturedState, numbers: list[int]) -> None:
    is_contributor = into.is_on_first_rank(parameters_of(optimizer))
    for index, shard, values in optimizer.own_parts():
        layout = ShardLayout.of_shard(shard)
        for key, value in values.items():
            full = join(name, "state", numbers[index], key)
            is_of_elements = isinstance(value, torch.Tensor) and value.shape == shard.run_shape
            if isinstance(value, torch.Tensor) and is_of_elements and not (shard.is_whole and not layout.is_divided):
                if is_contributor or layout.is_divided:
                    into.hold(layout.local_regions(full, value))
            elif shard.is_first_part and (layout.is_on_first_rank if layout.is_divided else is_contributor):
                if isinstance(value, torch.Tensor):
                    layout.applies_to(value, full)  # raises TypeError if the tensor cannot be saved
                into.hold_tree(full, value)


def unsaved_gradients(state: TrainingState) -> list[str]:
    """Returns the names of parameters whose gradients have not been used by an optimizer and would not be saved.

    Before the first observed step, gradients of parameters with optimizer state are assumed to have been used.
    """
    found = list(entries(state))
    saved = {id(module_of(value.module)) for _, value in found if isinstance(value, PendingGradients)}
    optimizers = [value for _, value in found if isinstance(value, Optimizer)]
    holders = {
        param: holder
        for optimizer in optimizers
        if isinstance(optimizer, PartitionedOptimizer)
        for param, holder in optimizer.gradient_holders()
    }

    def is_lost(param: nn.Parameter) -> bool:
        if not GRADIENT_USE.has_seen_step and any(optimizer.state.get(param) for optimizer in optimizers):
            return False
        return is_pending(param) or (param in holders and is_pending(holders[param]))

    modules = {name: module for name, value in found if (module := module_of(value)) is not None}
    return [
        join(name, uncompiled_key(module, key))
        for name, module in modules.items()
        if id(module) not in saved
        for key, param in module.named_parameters()
        if is_lost(param)
    ]


def elastic_of(state: TrainingState) -> ElasticState | None:
    """Returns the `ElasticState` in a state, or None."""
    return next((value for value in _members(state) if isinstance(value, ElasticState)), None)


class RandomState:
    """The state of this process's random number generators (Python, torch and NumPy), for use in a checkpoint.

    If the process has used an accelerator, such as CUDA, the generators of all its devices are saved, beginning with
    the generator of the current device. On loading, the first saved state is restored on the current device.

    Each rank saves its own state and loads it again. Ranks for which no state was saved load the state of rank 0.

    Example::

        paceline.save({"model": model, "random": paceline.RandomState()}, "checkpoints")
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the generators."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        accelerator = accelerator_in_use()
        if accelerator is not None:
            module = torch.get_device_module(accelerator)
            state[accelerator.type] = [module.get_rng_state(index) for index in _indices_from_current()]
        if "numpy" in sys.modules:
            kind, keys, *rest = sys.modules["numpy"].random.get_state()
            state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the generators. Generators that are missing from the state are left unchanged."""
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        torch.set_rng_state(state["torch"])
        accelerator = current_accelerator()
        if accelerator is not None and accelerator.type in state and torch.accelerator.device_count() > 0:
            saved = state[accelerator.type]  # a tensor in checkpoints from earlier releases
            module = torch.get_device_module(accelerator)
            for index, own in zip(
                _indices_from_current(), [saved] if isinstance(saved, torch.Tensor) else saved, strict=False
            ):
                module.set_rng_state(own, index)
        if "numpy" in state and "numpy" in sys.modules:
            kind, keys, *rest = state["numpy"]
            sys.modules["numpy"].random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def _indices_from_current() -> list[int]:
    """Returns the indices of all devices, beginning with the current one."""
    count, current = torch.accelerator.device_count(), torch.accelerator.current_device_index()
    return [(current + offset) % count for offset in range(count)]
