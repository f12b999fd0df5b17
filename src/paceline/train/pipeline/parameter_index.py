"""What the parts of a divided model are called in the whole one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

_PLACE = "_paceline_place_in_whole"


@dataclass(frozen=True)
class ParameterIndex:
    """A parameter's number among those of the whole model, as `parameters()` yields them, and how many there are."""

    number: int
    of: int


@dataclass(frozen=True)
class UndividedModel:
    """A model before its layers were divided among ranks.

    Attributes:
        names: the names of the layers in it, by their names in the `Pipeline`.
        keys: the keys of its `state_dict()`.
    """

    names: Mapping[str, str]
    keys: frozenset[str]

    def key_of(self, key: str) -> str:
        """Returns a key of the whole model's `state_dict`, given one of the Pipeline's."""
        layer, _, rest = key.partition(".")
        return _within(self.names[layer], rest)


def describe_undivided(names: Sequence[str], layers: Sequence[nn.Module], whole: nn.Module | None) -> UndividedModel:
    """Describes the whole model, and has its parameters remember their places in it.

    Args:
        names: of the layers in the Pipeline.
        layers: all of them.
        whole: the model that they were taken from; None for one in which they have the same names.

    Raises:
        ValueError: a layer is not in the whole model, or a tensor of that is in none of the layers.
    """
    if whole is None:
        paths = dict(zip(names, names, strict=True))
        parameters = list(nn.ModuleList(layers).parameters())
    else:
        paths = _found(names, layers, whole)
        parameters = list(whole.parameters())
    keys = {_within(paths[name], key) for name, layer in zip(names, layers, strict=True) for key in layer.state_dict()}
    if whole is not None and (missing := sorted(whole.state_dict().keys() - keys)):
        raise ValueError(
            f"Pipeline: none of the layers has {missing[0]!r} of the whole model; give all of its layers, in the order "
            "in which they run"
        )
    for number, parameter in enumerate(parameters):
        setattr(parameter, _PLACE, ParameterIndex(number, len(parameters)))
    return UndividedModel(paths, frozenset(keys))


def index_in_model(parameter: torch.Tensor) -> ParameterIndex | None:
    """Returns the place of a parameter of a `Pipeline`, whose other parameters are on other ranks; None for others."""
    found: ParameterIndex | None = getattr(parameter, _PLACE, None)
    return found


def _found(names: Sequence[str], layers: Sequence[nn.Module], whole: nn.Module) -> dict[str, str]:
    paths = {id(module): path for path, module in whole.named_modules()}
    for name, layer in zip(names, layers, strict=True):
        if id(layer) not in paths and layer.state_dict():
            raise ValueError(
                f"Pipeline: layer {name}, a {type(layer).__name__}, is no module of the whole model; take the layers "
                "from it"
            )
    return {name: paths.get(id(layer), name) for name, layer in zip(names, layers, strict=True)}


def _within(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
