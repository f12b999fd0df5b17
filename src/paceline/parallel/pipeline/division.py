"""Divides a model's layers into stages, and a batch into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn


def into_stages(layers: Sequence[nn.Module], stages: int, split: Sequence[int] | None) -> list[list[int]]:
    """Returns which layers each stage has.

    Args:
        split: how many layers each stage has; None divides them so that the largest stage has as few parameters as
            possible, counting a layer without parameters as one.

    Raises:
        ValueError: there are fewer layers than stages, or `split` does not fit.
    """
    if split is not None:
        if len(split) != stages or sum(split) != len(layers) or min(split) < 1:
            raise ValueError(
                f"Pipeline: split={list(split)} must be {stages} numbers of at least 1, one a stage, whose sum is "
                f"{len(layers)}, the number of layers"
            )
        ends = list(accumulate(split))
        return [list(range(end - size, end)) for end, size in zip(ends, split, strict=True)]
    if len(layers) < stages:
        raise ValueError(f"Pipeline: there are {len(layers)} layers for {stages} stages; each stage needs at least one")
    return _balanced([1 + sum(p.numel() for p in layer.parameters()) for layer in layers], stages)


def _balanced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Returns consecutive parts of which the heaviest is as light as possible, by bisection."""
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(weights, middle, parts)) <= parts:
            high = middle
        else:
            low = middle + 1
    return _filled(weights, low, parts)


def _filled(weights: Sequence[int], most: int, parts: int) -> list[list[int]]:
    """Fills parts up to `most`, but leaves at least one element for each part that is still to come."""
    filled: list[list[int]] = [[]]
    weight = 0
    for at, each in enumerate(weights):
        still_to_come = parts - len(filled)
        if filled[-1] and (weight + each > most or len(weights) - at <= still_to_come):
            filled.append([])
            weight = 0
        filled[-1].append(at)
        weight += each
    return filled


def into_micro_batches(batch: tuple[torch.Tensor, ...], micro_batches: int) -> list[tuple[torch.Tensor, ...]]:
    """Returns the rows of each tensor as evenly divided as possible."""
    return list(zip(*(each.tensor_split(micro_batches) for each in batch), strict=True))
