"""Loads what other libraries saved into the objects of a training loop; every rank reads it for itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint.divided import is_divided, part_of_saved, require_fit
from paceline.checkpoint.foreign.state import Foreign, state_of
from paceline.checkpoint.names import join, some
from paceline.checkpoint.numbering import Numbering
from paceline.checkpoint.objects import State, holds_objects, key_in_whole, may_be_missing, module_of
from paceline.checkpoint.optimizers import own_state_dict
from paceline.checkpoint.trees import with_classes_of
from paceline.elastic.registry import Stateful
from paceline.errors import CheckpointError
from paceline.parallel.one_copy.parameters import private_parameters_of
from paceline.parallel.optimizer_state import load_optimizer
from paceline.parallel.pipeline.module import Pipeline
from paceline.parallel.zero.parameters import sharded_parameters_of

_PREFIX = "module."


def adopt(state: State, foreign: Foreign, numberings: Mapping[str, Numbering], *, strict: bool) -> None:
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
    state: State,
    tree: Mapping[Any, Any],
    foreign: Foreign,
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
