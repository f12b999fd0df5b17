"""StateRestorer: restores the objects of a training loop from a `LoadPlan` or a checkpoint from another library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import CheckpointError
from paceline.train.checkpoint.captured_state import (
    TrainingState,
    holds_objects,
    key_in_whole,
    keys_in_whole,
    may_be_missing,
    module_of,
)
from paceline.train.checkpoint.foreign.foreign_file import ForeignCheckpoint, state_of
from paceline.train.checkpoint.format.values import SEPARATOR, escaped, first_key, join, some, unescaped
from paceline.train.checkpoint.optimizers import Numbering, own_groups, own_state_dict
from paceline.train.checkpoint.pytree import copying_into, with_classes_of
from paceline.train.checkpoint.read import LoadPlan, number_of
from paceline.train.checkpoint.shard_layout import (
    LoadTargets,
    ParameterLayouts,
    RunPart,
    ShardLayout,
    is_divided,
    parameters_of,
    require_fit,
)
from paceline.train.elastic.training_state import Stateful
from paceline.train.elastic.worker.elastic_state import ElasticState
from paceline.train.module_tensors import key_finder, uncompiled_key
from paceline.train.pipeline.pipeline import Pipeline
from paceline.train.shared_model.shared_parameters import private_parameters_of
from paceline.train.zero.optimizer_state import load_optimizer
from paceline.train.zero.partitioned_optimizer import PartitionedOptimizer
from paceline.train.zero.sharded_parameters import ShardedParameters, sharded_parameters_of

Later = Callable[[], Any]
"""A function that returns a value once everything has been read."""


class StateRestorer:
    """Requests the data for the objects in a state, and restores the objects once the data has been read.

    If `strict` is set, the checkpoint must contain everything in the state, with the same parameter names in modules.
    `contexts` are the contexts that stay open while parameters are written.
    """

    def __init__(self, plan: LoadPlan, strict: bool, contexts: ExitStack, numberings: Mapping[str, Numbering]) -> None:
        self._plan, self._strict, self._contexts = plan, strict, contexts
        self._layouts, self._targets = ParameterLayouts(), LoadTargets()
        self._optimizers = OptimizerRestorer(plan, numberings, self._layouts)
        self._where = plan.checkpoint.describe()

    def request(self, state: TrainingState, name: str = "") -> None:
        """Requests everything in `state`. When the plan finishes, the plain values in `state` are replaced."""
        for key, value in state.items():
            inner = join(name, key)
            if isinstance(value, ElasticState):
                self.request(value.parts(), inner)
                self._request(join(inner, "epoch"), value, state, key)
            elif isinstance(value, dict) and holds_objects(value):
                self.request(value, inner)
            elif self._is_saved(inner, value):
                self._request(inner, value, state, key)

    def _is_saved(self, name: str, value: object) -> bool:
        if self._plan.has(name):
            return True
        if self._strict and not may_be_missing(value):
            raise CheckpointError(
                f"{self._where} has no {name!r}; it has {', '.join(map(repr, self._plan.top_names()))}. Leave it out "
                "of the state, or pass strict=False"
            )
        return False

    def _request(self, name: str, value: object, state: TrainingState, key: str) -> None:
        module = module_of(value)
        require_fit(name, module, value)
        if module is not None:
            self._request_module(name, module)
        elif isinstance(value, Optimizer):
            self._optimizers.request(name, value)
        elif isinstance(value, torch.Tensor):
            self._targets.require(name, value)
            self._plan.into(name, value)
        elif isinstance(value, Stateful):
            tree = self._plan.tree(name)
            self._plan.add_finalizer(lambda: value.load_state_dict(with_classes_of(tree(), value.state_dict())))
        else:
            tree = self._plan.tree(name)

            def replace() -> None:
                assert isinstance(state, dict)
                state[key] = with_classes_of(tree(), value)

            self._plan.add_finalizer(replace)

    def _request_module(self, name: str, module: nn.Module) -> None:
        sharded = sharded_parameters_of(module)
        if sharded is not None:
            sharded.free_all()
        self._contexts.enter_context(private_parameters_of(module))
        saved_name = self._plan.own_name(name)
        by_all = not isinstance(module, Pipeline) and saved_name == name
        name = saved_name
        saved_keys = self._saved_keys(name, keys_in_whole(module))
        for key, value in module.state_dict(keep_vars=True).items():
            in_whole = key_in_whole(module, key)
            full = join(name, saved_keys.get(in_whole, in_whole))
            if not self._plan.has(full):
                continue
            shards = None if sharded is None else sharded.shards_of(value)
            if shards is not None:
                for shard in shards:
                    if (run := ShardedParameters.own_run(shard)) is not None:
                        self._request_local(full, run, ShardLayout.of_shard(shard))
            elif isinstance(value, torch.Tensor):
                self._targets.require(full, value)
                layout = self._layouts[value]
                if layout.is_divided:
                    self._request_local(full, value, layout)
                else:
                    self._plan.into(full, value, by_all=by_all)
            else:
                self._request_extra_state(full, key, module, by_all)

    def _saved_keys(self, name: str, own: Set[str]) -> dict[str, str]:
        """Maps a module's own keys to its saved keys. The keys differ if a compiled module was saved."""
        below = {unescaped(first_key(rest)) for rest in self._plan.names_below(name)}
        find = key_finder(own)
        saved = {find(key): key for key in below}
        self._require_names(name, {escaped(key) for key in own}, {escaped(key) for key in saved})
        return saved

    def _require_names(self, name: str, expected: Set[str], found: Set[str]) -> None:
        if not self._strict:
            return
        if not found and self._plan.values.get(name, {}) != {}:
            raise CheckpointError(
                f"{name!r} is a module here, and a plain value in {self._where}; load it into an object of the saved "
                "type"
            )
        if expected != found:
            raise CheckpointError(
                f"{name!r} in {self._where} belongs to another model: it lacks {some(expected - found)}, and also has "
                f"{some(found - expected)}. Load it into the same model, or pass strict=False"
            )

    def _request_local(self, name: str, target: torch.Tensor, layout: ShardLayout) -> None:
        """Requests that this rank's elements of a parameter be read into `target`."""
        if layout.region is not None:
            self._plan.into(name, target, shape=layout.shape, region=layout.region, by_all=False)
            return
        for part in layout.parts:
            _fill_later(self._plan, part, target, self._plan.region(name, part.region))

    def _request_extra_state(self, name: str, key: str, module: nn.Module, by_all: bool) -> None:
        tree = self._plan.tree(name, by_all=by_all)
        path, _, member = key.rpartition(".")
        assert member == "_extra_state"
        self._plan.add_finalizer(lambda: module.get_submodule(path).set_extra_state(tree()))


class OptimizerRestorer:
    """Requests the state of optimizers, and loads it once it has been read."""

    def __init__(self, plan: LoadPlan, numberings: Mapping[str, Numbering], layouts: ParameterLayouts) -> None:
        self._plan, self._numberings, self._layouts = plan, numberings, layouts

    def request(self, name: str, optimizer: Optimizer) -> None:
        """Requests the state of an optimizer."""
        saved_name = self._plan.own_name(name)
        if not self._plan.has(join(saved_name, "param_groups")):
            raise CheckpointError(
                f"{name!r} is an optimizer here, and something else in {self._plan.checkpoint.describe()}; load it "
                "into an object of the saved type, or into None to get the saved value"
            )
        numbering = self._numberings.get(name)
        if isinstance(optimizer, PartitionedOptimizer):
            self._request_partitioned(saved_name, optimizer, numbering)
        else:
            self._request_usual(saved_name, optimizer, numbering, by_all=numbering is None and saved_name == name)

    def _request_usual(self, name: str, optimizer: Optimizer, numbering: Numbering | None, *, by_all: bool) -> None:
        layout_of: dict[object, ShardLayout] = {
            number: self._layouts[parameter]
            for number, parameter in zip(_numbers(optimizer, numbering), parameters_of(optimizer), strict=True)
        }
        trees: dict[str, Later] = {}
        states: dict[object, dict[object, Later]] = {}
        undivided: dict[object, Later] = {}
        for rest, full in self._plan.names_below(name).items():
            keys = [unescaped(part) for part in rest.split(SEPARATOR)]
            if keys[0] == "state" and len(keys) in (2, 3):
                number = number_of(keys[1])
                if numbering is not None and number not in layout_of:
                    continue
                kept = self._kept(full, layout_of.get(number), by_all=by_all)
                if len(keys) == 2:
                    undivided[number] = kept
                else:
                    states.setdefault(number, {})[keys[2]] = kept
            elif len(keys) == 1:
                trees[keys[0]] = self._plan.tree(full, by_all=by_all)

        def load() -> None:
            state: dict[object, Any]
            state = {number: {key: tree() for key, tree in kept.items()} for number, kept in states.items()}
            state.update({number: tree() for number, tree in undivided.items()})
            others = {key: tree() for key, tree in trees.items()}
            if "param_groups" in others:
                others["param_groups"] = own_groups(others["param_groups"], optimizer, numbering)
            load_optimizer(optimizer, {"state": state, **others})

        self._plan.add_finalizer(load)

    def _kept(self, name: str, layout: ShardLayout | None, *, by_all: bool) -> Later:
        """Requests an optimizer value for a parameter, or only this rank's region of it if the parameter is divided."""
        entry = self._plan.tensors.get(name)
        if entry is None or layout is None or not layout.is_divided or entry.shape != layout.shape:
            return self._plan.tree(name, by_all=by_all)
        return self._elements_of(name, layout).detach

    def _request_partitioned(self, name: str, optimizer: PartitionedOptimizer, numbering: Numbering | None) -> None:
        groups = self._plan.tree(join(name, "param_groups"))
        numbers = _numbers(optimizer, numbering)
        states = [
            self._state_of_shard(join(name, "state", numbers[index]), ShardLayout.of_shard(shard))
            for index, shard, _ in optimizer.own_parts()
        ]
        self._plan.add_finalizer(
            lambda: optimizer.load_own_parts(
                own_groups(groups(), optimizer, numbering),
                [{key: read() for key, read in state.items()} for state in states],
            )
        )

    def _state_of_shard(self, name: str, layout: ShardLayout) -> dict[str, Later]:
        state: dict[str, Later] = {}
        for rest, full in self._plan.names_below(name).items():
            if SEPARATOR in rest:
                continue
            entry = self._plan.tensors.get(full)
            if entry is None:
                state[unescaped(rest)] = self._plan.tree(full, by_all=False)
            elif entry.shape == layout.shape and entry.shape:
                state[unescaped(rest)] = self._elements_of(full, layout).detach
            else:
                state[unescaped(rest)] = self._plan.tensor(full, by_all=False).detach
        return state

    def _elements_of(self, name: str, layout: ShardLayout) -> torch.Tensor:
        """Requests this rank's elements of a tensor; returns the tensor into which they will be read."""
        if layout.region is not None:
            return self._plan.region(name, layout.region).view(layout.local_shape)
        reads = [self._plan.region(name, part.region) for part in layout.parts]
        run = torch.empty(layout.local_shape, dtype=reads[0].dtype, device=reads[0].device)
        for part, read in zip(layout.parts, reads, strict=True):
            _fill_later(self._plan, part, run, read)
        return run


def _fill_later(plan: LoadPlan, part: RunPart, run: torch.Tensor, read: torch.Tensor) -> None:
    def fill() -> None:
        with copying_into([run]):
            part.fill(run, read)

    plan.add_finalizer(fill)


def _numbers(optimizer: Optimizer, numbering: Numbering | None) -> list[int]:
    """Returns the numbers of this rank's parameters in the optimizer of the whole model."""
    if numbering is None:
        return list(range(len(parameters_of(optimizer))))
    return list(chain.from_iterable(numbering.of_own(optimizer)))


_PREFIX = "module."  # the prefix that DistributedDataParallel adds to each name


def load_foreign(
    state: TrainingState, foreign: ForeignCheckpoint, numberings: Mapping[str, Numbering], *, strict: bool
) -> None:
    """Loads a foreign checkpoint into `state`; every rank must call this.

    If the checkpoint is itself the `state_dict` of a model, it is loaded into the only module in `state`. Every rank
    reads the entire checkpoint, and loads its part of a divided model.
    """
    tree, where = state_of(foreign), f"{foreign.path} ({foreign.kind})"
    modules = [name for name, value in state.items() if module_of(value) is not None]
    if isinstance(tree, Mapping) and not set(tree) & set(state) and len(modules) == 1:
        tree = {modules[0]: tree}
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{where} holds a {type(tree).__name__}; load needs a dict")
    _adopt_all(state, tree, where, numberings, strict)


def _adopt_all(
    state: TrainingState,
    tree: Mapping[Any, Any],
    where: str,
    numberings: Mapping[str, Numbering],
    strict: bool,
    within: str = "",
) -> None:
    for name, value in state.items():
        full = join(within, name)
        if name not in tree:
            if strict and not may_be_missing(value):
                raise CheckpointError(
                    f"{where} has no {name!r}; it has {', '.join(map(repr, tree))}. Leave it out of the state, or pass "
                    "strict=False"
                )
            continue
        module, found = module_of(value), tree[name]
        require_fit(full, module, value)
        holds = isinstance(value, dict) and holds_objects(value)
        if not isinstance(found, Mapping) and (module is not None or holds or isinstance(value, Optimizer)):
            raise CheckpointError(
                f"{full!r} is a {type(value).__name__} here, and a {type(found).__name__} in {where}; load it into an "
                "object of the saved type"
            )
        if module is not None:
            if not all(isinstance(key, str) for key in found):
                kind = next(type(key).__name__ for key in found if not isinstance(key, str))
                raise CheckpointError(
                    f"{full!r} is a module here, but in {where} it is a dict with a key of type {kind}; load it into "
                    "None to get the saved value"
                )
            _adopt_module(full, module, found, strict)
        elif holds:
            _adopt_all(value, found, where, numberings, strict, full)
        elif isinstance(value, Optimizer) and is_divided(value):
            load_optimizer(value, own_state_dict(full, found, value, numberings.get(full)))
        elif isinstance(value, Stateful):
            # A ZeRO optimizer cannot return its state_dict without the other ranks.
            needs_ranks = hasattr(value, "consolidate_state_dict")
            value.load_state_dict(found if needs_ranks else with_classes_of(found, value.state_dict()))
        elif isinstance(value, torch.Tensor):
            _adopt_tensor(full, value, found, where)
        else:
            assert isinstance(state, dict)
            state[name] = with_classes_of(found, value)


def _adopt_tensor(name: str, tensor: torch.Tensor, found: object, where: str) -> None:
    if not isinstance(found, torch.Tensor):
        raise CheckpointError(
            f"{name!r} is a tensor here, and a {type(found).__name__} in {where}; load it into None to get the saved "
            "value"
        )
    if found.shape != tensor.shape:
        raise CheckpointError(
            f"{name!r} has the shape {list(found.shape)} in {where}, but {list(tensor.shape)} here; load it into None "
            "to get the saved value"
        )
    LoadTargets().require(name, tensor)
    with copying_into([tensor]):
        tensor.copy_(found)


def _adopt_module(name: str, module: nn.Module, found: Mapping[str, Any], strict: bool) -> None:
    for prefix in (_PREFIX, f"_orig_mod.{_PREFIX}"):  # saved from a DistributedDataParallel, which may be compiled
        if all(key.startswith(prefix) for key in found):
            found = {key.removeprefix(prefix): value for key, value in found.items()}
            break
    found = _renamed(found, key_finder(keys_in_whole(module)))
    with ExitStack() as contexts:
        sharded = sharded_parameters_of(module)
        if sharded is not None:
            contexts.enter_context(sharded.all_present())
        contexts.enter_context(private_parameters_of(module))
        if is_divided(module):
            found = _own_part(module, found, strict)
        else:
            own_keys = {uncompiled_key(module, key): key for key in module.state_dict(keep_vars=True)}
            found = _renamed(found, lambda key: own_keys.get(key, key))
        targets = {
            key: value
            for key, value in module.state_dict(keep_vars=True).items()
            if key in found and isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value)
        }
        checked = LoadTargets()
        for key, value in targets.items():
            checked.require(join(name, key), value)
        contexts.enter_context(copying_into(targets.values()))
        module.load_state_dict(found, strict=strict)


def _renamed(found: Mapping[str, Any], to: Callable[[str], str]) -> Mapping[str, Any]:
    """Applies `to` to the keys of a `state_dict`; returns the original, with its metadata, if no key changes."""
    if all(to(key) == key for key in found):
        return found
    return {to(key): value for key, value in found.items()}


def _own_part(module: nn.Module, found: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """Returns this rank's part of the `state_dict` of an undivided model, keyed by this rank's names."""
    own: dict[str, Any] = module.state_dict(keep_vars=True)
    expected = keys_in_whole(module)
    if strict and expected != found.keys():
        raise CheckpointError(
            f"the saved state belongs to another model: it lacks {some(expected - found.keys())}, and also has "
            f"{some(found.keys() - expected)}. Load it into the same model, or pass strict=False"
        )
    parts = {}
    for key, value in own.items():
        if (name := key_in_whole(module, key)) in found:
            saved = found[name]
            parts[key] = ShardLayout.of(value).part_of_saved(saved, name) if isinstance(value, torch.Tensor) else saved
    return parts
