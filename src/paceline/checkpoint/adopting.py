"""Loads what other libraries saved into the objects of a training loop; every rank reads it for itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from paceline.checkpoint.foreign.state import Foreign, state_of
from paceline.checkpoint.objects import State, holds_objects, module_of
from paceline.checkpoint.trees import with_classes_of
from paceline.elastic.registry import Stateful
from paceline.errors import CheckpointError
from paceline.parallel.one_copy.parameters import private_parameters_of
from paceline.parallel.zero.parameters import sharded_parameters_of

_PREFIX = "module."


def adopt(state: State, foreign: Foreign, *, strict: bool) -> None:
    """Loads a foreign state into `state`; every rank calls this.

    Where a file is the `state_dict` of a model itself, it is loaded into the only module of `state`.

    Raises:
        CheckpointError: something in the state is not in the file.
    """
    tree = state_of(foreign)
    modules = [name for name, value in state.items() if module_of(value) is not None]
    if isinstance(tree, Mapping) and not set(tree) & set(state) and len(modules) == 1:
        tree = {modules[0]: tree}
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{foreign.path} ({foreign.kind}) holds a {type(tree).__name__}; load needs a dict")
    _adopt_all(state, tree, foreign, strict)


def _adopt_all(state: State, tree: Mapping[Any, Any], foreign: Foreign, strict: bool) -> None:
    for name, value in state.items():
        if name not in tree:
            if strict:
                raise CheckpointError(
                    f"{foreign.path} ({foreign.kind}) has no {name!r}; it has {', '.join(map(repr, tree))}. Leave it "
                    "out of the state, or give strict=False"
                )
            continue
        module, found = module_of(value), tree[name]
        if module is not None:
            _adopt_module(module, found, strict)
        elif isinstance(value, dict) and holds_objects(value):
            _adopt_all(value, found, foreign, strict)
        elif isinstance(value, Stateful):
            value.load_state_dict(with_classes_of(found, value.state_dict()) if _can_tell(value) else found)
        else:
            assert isinstance(state, dict)
            state[name] = with_classes_of(found, value)


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
        module.load_state_dict(found, strict=strict)
