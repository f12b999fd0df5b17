"""How modules, optimizers and other objects take over what a checkpoint has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.filling import Filling
from paceline.checkpoint.layout import parts_of_run
from paceline.checkpoint.names import SEPARATOR, escaped, join, unescaped
from paceline.checkpoint.objects import State, holds_objects, module_of
from paceline.checkpoint.trees import with_classes_of
from paceline.elastic.registry import Stateful
from paceline.elastic.state import ElasticState
from paceline.errors import CheckpointError
from paceline.parallel.one_copy.parameters import private_parameters_of
from paceline.parallel.zero.parameters import ShardedParameters, sharded_parameters_of
from paceline.parallel.zero.partitioned import PartitionedOptimizer
from paceline.parallel.zero.shards import Shard


class Restoring:
    """Asks for what the objects of a state need, and puts it in when it has been read.

    Args:
        filling: what is wanted of the checkpoint.
        strict: whether modules must have the same names as the checkpoint, and everything in the state must be there.
        contexts: entered while parameters are written to.
    """

    def __init__(self, filling: Filling, strict: bool, contexts: ExitStack) -> None:
        self._filling, self._strict, self._contexts = filling, strict, contexts
        self._where = filling.checkpoint.describe()

    def want(self, state: State, name: str = "") -> None:
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
            elif self._is_there(inner):
                self._want(inner, value, state, key)

    def _is_there(self, name: str) -> bool:
        if self._filling.has(name):
            return True
        if self._strict:
            raise CheckpointError(
                f"{self._where} has no {name!r}; it has {', '.join(map(repr, self._filling.top_names()))}. Leave it "
                "out of the state, or give strict=False"
            )
        return False

    def _want(self, name: str, value: object, state: State, key: str) -> None:
        module = module_of(value)
        if module is not None:
            self._want_module(name, module)
        elif isinstance(value, PartitionedOptimizer):
            self._want_partitioned(name, value)
        elif isinstance(value, torch.optim.Optimizer):
            self._want_optimizer(name, value)
        elif isinstance(value, torch.Tensor):
            self._filling.into(name, value)
        elif isinstance(value, Stateful):
            self._want_object(name, value)
        else:
            tree = self._filling.tree(name)

            def replace() -> None:
                assert isinstance(state, dict)
                state[key] = with_classes_of(tree(), value)

            self._filling.finally_do(replace)

    def _want_object(self, name: str, value: Stateful) -> None:
        tree = self._filling.tree(name)
        self._filling.finally_do(lambda: value.load_state_dict(with_classes_of(tree(), value.state_dict())))

    def _want_module(self, name: str, module: nn.Module) -> None:
        sharded = sharded_parameters_of(module)
        if sharded is not None:
            sharded.free_all()
        self._contexts.enter_context(private_parameters_of(module))
        own = module.state_dict(keep_vars=True)
        self._require_names(name, own)
        for key, value in own.items():
            full = join(name, key)
            if not self._filling.has(full):
                continue
            shards = None if sharded is None else sharded.shards_of(value)
            if shards is not None:
                for shard in shards:
                    if (run := ShardedParameters.own_run(shard)) is not None:
                        self._want_run(full, shard, run)
            elif isinstance(value, torch.Tensor):
                self._filling.into(full, value)
            else:
                self._want_extra(full, key, module)

    def _require_names(self, name: str, own: Mapping[str, object]) -> None:
        expected = {escaped(key) for key in own}
        found = {rest.partition("@")[0].partition(SEPARATOR)[0] for rest in self._filling.names_below(name)}
        if self._strict and expected != found:
            raise CheckpointError(
                f"{name!r} in {self._where} is another model's: it lacks {_some(expected - found)}, and has "
                f"{_some(found - expected)} besides. Load it into the same model, or give strict=False"
            )

    def _want_run(self, name: str, shard: Shard, run: torch.Tensor) -> None:
        if shard.is_whole:
            self._filling.into(name, run, by_all=False)
            return
        for part in parts_of_run(tuple(shard.shape), shard.strides, *shard.elements):
            read = self._filling.region(name, part.region)
            self._filling.finally_do(_filling_run(part.fill, run, read))

    def _want_extra(self, name: str, key: str, module: nn.Module) -> None:
        tree = self._filling.tree(name)
        self._filling.finally_do(lambda: _load_extra(module, key, tree()))

    def _want_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        trees: dict[str, Callable[[], Any]] = {}
        states: dict[object, dict[object, Callable[[], Any]]] = {}
        for rest, full in self._filling.names_below(name).items():
            keys = [unescaped(each) for each in rest.split(SEPARATOR)]
            if keys[0] == "state" and len(keys) == 3:
                states.setdefault(_number(keys[1]), {})[keys[2]] = self._filling.tree(full)
            elif len(keys) == 1:
                trees[keys[0]] = self._filling.tree(full)

        def load() -> None:
            state = {index: {key: tree() for key, tree in each.items()} for index, each in states.items()}
            optimizer.load_state_dict({"state": state, **{key: tree() for key, tree in trees.items()}})

        self._filling.finally_do(load)

    def _want_partitioned(self, name: str, optimizer: PartitionedOptimizer) -> None:
        groups = self._filling.tree(join(name, "param_groups"))
        states = [self._wanted_state(join(name, "state", place), shard) for place, shard, _ in optimizer.own_parts()]
        self._filling.finally_do(
            lambda: optimizer.load_own_parts(
                groups(), [{key: each() for key, each in state.items()} for state in states]
            )
        )

    def _wanted_state(self, name: str, shard: Shard) -> dict[str, Callable[[], Any]]:
        wanted: dict[str, Callable[[], Any]] = {}
        for rest, full in self._filling.names_below(name).items():
            if SEPARATOR in rest:
                continue
            entry = self._filling.tensors.get(full)
            if entry is None:
                wanted[unescaped(rest)] = self._filling.tree(full)
            elif entry.shape == tuple(shard.shape) and entry.shape and not shard.is_whole:
                run = self._run_of(full, shard)
                wanted[unescaped(rest)] = _returning(run)
            else:
                wanted[unescaped(rest)] = _returning(self._filling.tensor(full, by_all=False))
        return wanted

    def _run_of(self, name: str, shard: Shard) -> torch.Tensor:
        """Returns memory in which this shard's elements of a tensor of the parameter's shape will be."""
        parts = parts_of_run(tuple(shard.shape), shard.strides, *shard.elements)
        if len(parts) == 1 and len(parts[0].in_memory) == 1:
            return self._filling.region(name, parts[0].region)
        reads = [self._filling.region(name, part.region) for part in parts]
        run = torch.empty(shard.run_shape, dtype=reads[0].dtype)
        for part, read in zip(parts, reads, strict=True):
            self._filling.finally_do(_filling_run(part.fill, run, read))
        return run


def _filling_run(
    fill: Callable[[torch.Tensor, torch.Tensor], None], run: torch.Tensor, read: torch.Tensor
) -> Callable[[], None]:
    def work() -> None:
        with torch.no_grad():
            fill(run, read)

    return work


def _returning(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def _number(key: str) -> object:
    return int(key) if key.isdigit() else key


def _load_extra(module: nn.Module, key: str, value: object) -> None:
    path, _, what = key.rpartition(".")
    assert what == "_extra_state"
    module.get_submodule(path).set_extra_state(value)


def _some(names: set[str]) -> str:
    """Returns the first few of many names, for a message."""
    return f"{sorted(names)[:5]}{' and others' if len(names) > 5 else ''}" if names else "none"
