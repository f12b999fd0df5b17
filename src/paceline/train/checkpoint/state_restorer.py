"""How modules, optimizers and other objects take over what a checkpoint has for them.

Loads what other libraries saved into the objects of a training loop; every rank reads it for itself.

How optimizers take over what a checkpoint has for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import CheckpointError
from paceline.train.checkpoint.foreign.foreign_file import ForeignCheckpoint, state_of
from paceline.train.checkpoint.format.values import SEPARATOR, escaped, join, some, unescaped
from paceline.train.checkpoint.optimizers import Numbering, own_groups, own_state_dict
from paceline.train.checkpoint.pytree import with_classes_of
from paceline.train.checkpoint.read import LoadPlan, number_of
from paceline.train.checkpoint.shard_layout import (
    is_divided,
    parameters_of,
    part_of_saved,
    parts_of_shard,
    region_of,
    region_of_shard,
    require_fit,
    shape_of,
    shape_of_shard,
)
from paceline.train.checkpoint.training_state import (
    TrainingState,
    holds_objects,
    key_in_whole,
    keys_in_whole,
    may_be_missing,
    module_of,
)
from paceline.train.elastic.worker.elastic_state import ElasticState
from paceline.train.elastic.worker.training_state import Stateful
from paceline.train.pipeline.pipeline import Pipeline
from paceline.train.shared_model.shared_parameters import private_parameters_of
from paceline.train.tensor.weight_slice import slice_of
from paceline.train.zero.optimizer_state import load_optimizer
from paceline.train.zero.partitioned_optimizer import PartitionedOptimizer
from paceline.train.zero.sharded_parameters import ShardedParameters, sharded_parameters_of
from paceline.train.zero.shards import Shard

_PREFIX = "module."


def load_foreign(
    state: TrainingState, foreign: ForeignCheckpoint, numberings: Mapping[str, Numbering], *, strict: bool
) -> None:
    """Loads a foreign state into `state`; every rank calls this.

    Where a file is the `state_dict` of a model itself, it is loaded into the only module of `state`. A model that is
    divided among ranks takes its parts of it.

    Args:
        numberings: of the optimizers of pipelines, by their names.

    Raises:
        CheckpointError: something in the state is not in the file.
    """
    tree = state_of(foreign)
    modules = [name for name, value in state.items() if module_of(value) is not None]
    if isinstance(tree, Mapping) and not set(tree) & set(state) and len(modules) == 1:
        tree = {modules[0]: tree}
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{foreign.path} ({foreign.kind}) holds a {type(tree).__name__}; load needs a dict")
    _adopt_all(state, tree, foreign, numberings, strict)


def _adopt_all(
    state: TrainingState,
    tree: Mapping[Any, Any],
    foreign: ForeignCheckpoint,
    numberings: Mapping[str, Numbering],
    strict: bool,
    within: str = "",
) -> None:
    for name, value in state.items():
        full = join(within, name)
        if name not in tree:
            if strict and not may_be_missing(value):
                raise CheckpointError(
                    f"{foreign.path} ({foreign.kind}) has no {name!r}; it has {', '.join(map(repr, tree))}. Leave it "
                    "out of the state, or give strict=False"
                )
            continue
        module, found = module_of(value), tree[name]
        require_fit(full, module, value)
        if not isinstance(found, Mapping) and _needs_dict(value, module):
            raise CheckpointError(
                f"{full!r} is a {type(value).__name__} here, and a {type(found).__name__} in {foreign.path} "
                f"({foreign.kind}); load it into what it was saved from"
            )
        if module is not None:
            _adopt_module(module, found, strict)
        elif isinstance(value, dict) and holds_objects(value):
            _adopt_all(value, found, foreign, numberings, strict, full)
        elif isinstance(value, Optimizer) and is_divided(value):
            load_optimizer(value, own_state_dict(full, found, value, numberings.get(full)))
        elif isinstance(value, Stateful):
            value.load_state_dict(with_classes_of(found, value.state_dict()) if _can_tell(value) else found)
        else:
            assert isinstance(state, dict)
            state[name] = with_classes_of(found, value)


def _needs_dict(value: object, module: nn.Module | None) -> bool:
    return module is not None or isinstance(value, Optimizer) or (isinstance(value, dict) and holds_objects(value))


def _can_tell(value: Stateful) -> bool:
    """Whether the object can say what its state looks like now; ZeRO's cannot without the other ranks."""
    return not hasattr(value, "consolidate_state_dict")


def _adopt_module(module: nn.Module, found: Mapping[str, Any], strict: bool) -> None:
    if all(key.startswith(_PREFIX) for key in found):  # saved with its wrapper
        found = {key[len(_PREFIX) :]: each for key, each in found.items()}
    with ExitStack() as contexts:
        sharded = sharded_parameters_of(module)
        if sharded is not None:
            contexts.enter_context(sharded.all_present())
        contexts.enter_context(private_parameters_of(module))
        if is_divided(module):
            found = _own_part(module, found, strict)
        module.load_state_dict(found, strict=strict)


def _own_part(module: nn.Module, found: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """Returns what this rank has of a whole model's `state_dict`, under the names that it has here.

    Raises:
        CheckpointError: it is another model's.
    """
    own: dict[str, Any] = module.state_dict(keep_vars=True)
    names = {key: key_in_whole(module, key) for key in own}
    expected = module.whole.keys if isinstance(module, Pipeline) else own.keys()
    if strict and expected != found.keys():
        raise CheckpointError(
            f"what was saved is another model's: {some(expected - found.keys())} are not in it, and "
            f"{some(found.keys() - expected)} are in it besides. Load it into the same model, or give strict=False"
        )
    parts = {}
    for key, value in own.items():
        if (name := names[key]) in found:
            parts[key] = part_of_saved(found[name], value, name) if isinstance(value, torch.Tensor) else found[name]
    return parts


Later = Callable[[], Any]
"""Returns something when everything has been read."""


class OptimizerRestorer:
    """Asks for what optimizers need, and puts it in when it has been read.

    Args:
        filling: what is wanted of the checkpoint.
        numberings: of the optimizers of pipelines, by their names.
    """

    def __init__(self, filling: LoadPlan, numberings: Mapping[str, Numbering]) -> None:
        self._filling, self._numberings = filling, numberings

    def want(self, name: str, optimizer: Optimizer) -> None:
        """Asks for the state of an optimizer.

        Raises:
            CheckpointError: what was saved is none.
        """
        if not self._filling.has(join(name, "param_groups")):
            raise CheckpointError(
                f"{name!r} is an optimizer here, and something else in {self._filling.checkpoint.describe()}; load it "
                "into what it was saved from, or into None to be given what was saved"
            )
        numbering = self._numberings.get(name)
        if isinstance(optimizer, PartitionedOptimizer):
            self._want_partitioned(name, optimizer, numbering)
        else:
            self._want_usual(name, optimizer, numbering)

    def _want_usual(self, name: str, optimizer: Optimizer, numbering: Numbering | None) -> None:
        parameters = parameters_of(optimizer)
        numbers = _numbers(optimizer, numbering)
        parameter_of: dict[object, torch.Tensor] = dict(zip(numbers, parameters, strict=True))
        trees: dict[str, Later] = {}
        states: dict[object, dict[object, Later]] = {}
        undivided: dict[object, Later] = {}
        for rest, full in self._filling.names_below(name).items():
            keys = [unescaped(each) for each in rest.split(SEPARATOR)]
            if keys[0] == "state" and len(keys) in (2, 3):
                number = number_of(keys[1])
                if numbering is not None and number not in parameter_of:
                    continue
                kept = self._kept(full, parameter_of.get(number), by_all=numbering is None)
                if len(keys) == 2:
                    undivided[number] = kept
                else:
                    states.setdefault(number, {})[keys[2]] = kept
            elif len(keys) == 1:
                trees[keys[0]] = self._filling.tree(full)

        def load() -> None:
            state: dict[object, Any]
            state = {number: {key: tree() for key, tree in each.items()} for number, each in states.items()}
            state.update({number: tree() for number, tree in undivided.items()})
            others = {key: tree() for key, tree in trees.items()}
            if "param_groups" in others:
                others["param_groups"] = own_groups(others["param_groups"], optimizer, numbering)
            load_optimizer(optimizer, {"state": state, **others})

        self._filling.add_finalizer(load)

    def _kept(self, name: str, parameter: torch.Tensor | None, *, by_all: bool) -> Later:
        """Asks for what an optimizer keeps for a parameter, of a divided one for this rank's part."""
        entry = self._filling.tensors.get(name)
        if entry is None or parameter is None or slice_of(parameter) is None or entry.shape != shape_of(parameter):
            return self._filling.tree(name, by_all=by_all)
        read = self._filling.region(name, region_of(parameter)).view(parameter.shape)
        return lambda: read

    def _want_partitioned(self, name: str, optimizer: PartitionedOptimizer, numbering: Numbering | None) -> None:
        groups = self._filling.tree(join(name, "param_groups"))
        numbers = _numbers(optimizer, numbering)
        states = [
            self._wanted_state(join(name, "state", numbers[place]), shard) for place, shard, _ in optimizer.own_parts()
        ]
        self._filling.add_finalizer(
            lambda: optimizer.load_own_parts(
                own_groups(groups(), optimizer, numbering),
                [{key: each() for key, each in state.items()} for state in states],
            )
        )

    def _wanted_state(self, name: str, shard: Shard) -> dict[str, Later]:
        wanted: dict[str, Later] = {}
        for rest, full in self._filling.names_below(name).items():
            if SEPARATOR in rest:
                continue
            entry = self._filling.tensors.get(full)
            if entry is None:
                wanted[unescaped(rest)] = self._filling.tree(full, by_all=False)
            elif entry.shape == shape_of_shard(shard) and entry.shape:
                wanted[unescaped(rest)] = _returning(self._elements_of(full, shard))
            else:
                wanted[unescaped(rest)] = _returning(self._filling.tensor(full, by_all=False))
        return wanted

    def _elements_of(self, name: str, shard: Shard) -> torch.Tensor:
        """Returns memory in which this shard's elements of a tensor of the undivided parameter's shape will be."""
        if shard.is_whole:
            return self._filling.region(name, region_of_shard(shard)).view(shard.shape)
        parts = parts_of_shard(shard)
        if len(parts) == 1 and len(parts[0].in_memory) == 1:
            return self._filling.region(name, parts[0].region)
        reads = [self._filling.region(name, part.region) for part in parts]
        run = torch.empty(shard.run_shape, dtype=reads[0].dtype)
        for part, read in zip(parts, reads, strict=True):
            self._filling.add_finalizer(filling_run(part.fill, run, read))
        return run


def filling_run(fill: Callable[[torch.Tensor, torch.Tensor], None], run: torch.Tensor, read: torch.Tensor) -> Later:
    """Returns what puts elements that were read into a run."""

    def work() -> None:
        with torch.no_grad():
            fill(run, read)

    return work


def _numbers(optimizer: Optimizer, numbering: Numbering | None) -> list[int]:
    """Returns the numbers of this rank's parameters in the optimizer of the whole model."""
    if numbering is None:
        return list(range(len(parameters_of(optimizer))))
    return list(chain.from_iterable(numbering.of_own(optimizer)))


def _returning(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


class StateRestorer:
    """Asks for what the objects of a state need, and puts it in when it has been read.

    Args:
        filling: what is wanted of the checkpoint.
        strict: whether modules must have the same names as the checkpoint, and everything in the state must be there.
        contexts: entered while parameters are written to.
        numberings: of the optimizers of pipelines, by their names.
    """

    def __init__(
        self, filling: LoadPlan, strict: bool, contexts: ExitStack, numberings: Mapping[str, Numbering]
    ) -> None:
        self._filling, self._strict, self._contexts = filling, strict, contexts
        self._optimizers = OptimizerRestorer(filling, numberings)
        self._where = filling.checkpoint.describe()

    def want(self, state: TrainingState, name: str = "") -> None:
        """Asks for everything in `state`; plain values are replaced in it at the end.

        Raises:
            CheckpointError: something is not in the checkpoint, or has another shape.
        """
        for key, value in state.items():
            inner = join(name, key)
            if isinstance(value, ElasticState):
                self.want(value.parts(), inner)
                self._want(join(inner, "epoch"), value, state, key)
            elif isinstance(value, dict) and holds_objects(value):
                self.want(value, inner)
            elif self._is_there(inner, value):
                self._want(inner, value, state, key)

    def _is_there(self, name: str, value: object) -> bool:
        if self._filling.has(name):
            return True
        if self._strict and not may_be_missing(value):
            raise CheckpointError(
                f"{self._where} has no {name!r}; it has {', '.join(map(repr, self._filling.top_names()))}. Leave it "
                "out of the state, or give strict=False"
            )
        return False

    def _want(self, name: str, value: object, state: TrainingState, key: str) -> None:
        module = module_of(value)
        require_fit(name, module, value)
        if module is not None:
            self._want_module(name, module)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizers.want(name, value)
        elif isinstance(value, torch.Tensor):
            self._filling.into(name, value)
        elif isinstance(value, Stateful):
            self._want_object(name, value)
        else:
            tree = self._filling.tree(name)

            def replace() -> None:
                assert isinstance(state, dict)
                state[key] = with_classes_of(tree(), value)

            self._filling.add_finalizer(replace)

    def _want_object(self, name: str, value: Stateful) -> None:
        tree = self._filling.tree(name)
        self._filling.add_finalizer(lambda: value.load_state_dict(with_classes_of(tree(), value.state_dict())))

    def _want_module(self, name: str, module: nn.Module) -> None:
        sharded = sharded_parameters_of(module)
        if sharded is not None:
            sharded.free_all()
        self._contexts.enter_context(private_parameters_of(module))
        own = module.state_dict(keep_vars=True)
        by_all = not isinstance(module, Pipeline)
        self._require_names(name, keys_in_whole(module))
        for key, value in own.items():
            full = join(name, key_in_whole(module, key))
            if not self._filling.has(full):
                continue
            shards = None if sharded is None else sharded.shards_of(value)
            if shards is not None:
                for shard in shards:
                    if (run := ShardedParameters.own_run(shard)) is not None:
                        self._want_run(full, shard, run)
            elif isinstance(value, torch.Tensor) and slice_of(value) is not None:
                self._filling.into(full, value, shape=shape_of(value), region=region_of(value), by_all=False)
            elif isinstance(value, torch.Tensor):
                self._filling.into(full, value, by_all=by_all)
            else:
                self._want_extra(full, key, module, by_all)

    def _require_names(self, name: str, own: Iterable[str]) -> None:
        expected = {escaped(key) for key in own}
        found = {rest.partition("@")[0].partition(SEPARATOR)[0] for rest in self._filling.names_below(name)}
        if self._strict and not found and self._filling.values.get(name, {}) != {}:
            raise CheckpointError(
                f"{name!r} is a module here, and a plain value in {self._where}; load it into what it was saved from"
            )
        if self._strict and expected != found:
            raise CheckpointError(
                f"{name!r} in {self._where} is another model's: it lacks {some(expected - found)}, and has "
                f"{some(found - expected)} besides. Load it into the same model, or give strict=False"
            )

    def _want_run(self, name: str, shard: Shard, run: torch.Tensor) -> None:
        shape = shape_of_shard(shard)
        if shard.is_whole:
            self._filling.into(name, run, shape=shape, region=region_of_shard(shard), by_all=False)
            return
        for part in parts_of_shard(shard):
            read = self._filling.region(name, part.region)
            self._filling.add_finalizer(filling_run(part.fill, run, read))

    def _want_extra(self, name: str, key: str, module: nn.Module, by_all: bool) -> None:
        tree = self._filling.tree(name, by_all=by_all)
        self._filling.add_finalizer(lambda: _load_extra(module, key, tree()))


def _load_extra(module: nn.Module, key: str, value: object) -> None:
    path, _, what = key.rpartition(".")
    assert what == "_extra_state"
    module.get_submodule(path).set_extra_state(value)
