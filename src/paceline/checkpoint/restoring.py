"""How modules, optimizers and other objects take over what a checkpoint has for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import torch
from torch import nn

from paceline.checkpoint.divided import (
    parts_of_shard,
    region_of,
    region_of_shard,
    require_fit,
    shape_of,
    shape_of_shard,
)
from paceline.checkpoint.filling import Filling
from paceline.checkpoint.names import SEPARATOR, escaped, join, some
from paceline.checkpoint.numbering import Numbering
from paceline.checkpoint.objects import State, holds_objects, key_in_whole, keys_in_whole, may_be_missing, module_of
from paceline.checkpoint.restoring_optimizers import RestoringOptimizers, filling_run
from paceline.checkpoint.trees import with_classes_of
from paceline.elastic.registry import Stateful
from paceline.elastic.state import ElasticState
from paceline.errors import CheckpointError
from paceline.parallel.one_copy.parameters import private_parameters_of
from paceline.parallel.pipeline.module import Pipeline
from paceline.parallel.tensor.slices import slice_of
from paceline.parallel.zero.parameters import ShardedParameters, sharded_parameters_of
from paceline.parallel.zero.shards import Shard


class Restoring:
    """Asks for what the objects of a state need, and puts it in when it has been read.

    Args:
        filling: what is wanted of the checkpoint.
        strict: whether modules must have the same names as the checkpoint, and everything in the state must be there.
        contexts: entered while parameters are written to.
        numberings: of the optimizers of pipelines, by their names.
    """

    def __init__(
        self, filling: Filling, strict: bool, contexts: ExitStack, numberings: Mapping[str, Numbering]
    ) -> None:
        self._filling, self._strict, self._contexts = filling, strict, contexts
        self._optimizers = RestoringOptimizers(filling, numberings)
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

    def _want(self, name: str, value: object, state: State, key: str) -> None:
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
            self._filling.finally_do(filling_run(part.fill, run, read))

    def _want_extra(self, name: str, key: str, module: nn.Module, by_all: bool) -> None:
        tree = self._filling.tree(name, by_all=by_all)
        self._filling.finally_do(lambda: _load_extra(module, key, tree()))


def _load_extra(module: nn.Module, key: str, value: object) -> None:
    path, _, what = key.rpartition(".")
    assert what == "_extra_state"
    module.get_submodule(path).set_extra_state(value)
