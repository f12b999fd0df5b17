"""UndividedModel and ParameterIndex: map a divided model's parameters to names and indices in the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

_INDEX = "_paceline_place_in_whole"


@dataclass(frozen=True)
class ParameterIndex:
    """The index of a parameter in the whole model's `parameters()` (`number`), and their total number (`of`)."""

    number: int
    of: int


@dataclass(frozen=True)
class UndividedModel:
    """The names in a model before its layers were divided among ranks.

    Attributes:
        names: a mapping from layer names in the `Pipeline` to names in this model.
        keys: the keys in the model's `state_dict()`.
    """

    names: Mapping[str, str]
    keys: frozenset[str]

    def key_of(self, key: str) -> str:
        """Converts a key in the Pipeline's `state_dict` to the key in the whole model's."""
        layer, _, rest = key.partition(".")
        return _within(self.names[layer], rest)


def describe_undivided(names: Sequence[str], layers: Sequence[nn.Module], whole: nn.Module | None) -> UndividedModel:
    """Describes the whole model, and attaches a ParameterIndex to each parameter.

    Args:
        names: the names of the layers in the Pipeline.
        layers: all layers of the pipeline.
        whole: the model that contains the layers; None if the layers have the same names in it.

    Raises:
        ValueError: a layer is not in the whole model, or the layers lack a tensor of the whole model.
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
        setattr(parameter, _INDEX, ParameterIndex(number, len(parameters)))
    return UndividedModel(paths, frozenset(keys))


def index_in_model(parameter: torch.Tensor) -> ParameterIndex | None:
    """Returns a parameter's index in the whole model, or None if the parameter does not belong to a `Pipeline`."""
    index: ParameterIndex | None = getattr(parameter, _INDEX, None)
    return index


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
