"""Checks the arguments of `StatefulLoader`."""

from __future__ import annotations

from typing import get_args

from torch.utils.data import IterableDataset

from paceline.data.order import Remainder


def require_readable(dataset: object, shuffle: bool | None, dataset_state: bool) -> None:
    """Raises if the loader cannot read the dataset, or not in this way; see `StatefulLoader`."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise ValueError(
                f"StatefulLoader got shuffle=True with a {kind}, which is a stream and has only its own order; shuffle "
                "in the dataset, seeded by the epoch that its set_epoch receives, and leave shuffle out"
            )
    elif not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"StatefulLoader got a {kind}; it needs an IterableDataset, or a dataset with __len__ and __getitem__, "
            "because samples are dealt out by their place in the stream or by their index"
        )
    elif dataset_state:
        raise ValueError(
            f"StatefulLoader got dataset_state=True with a {kind}, which is not a stream; leave it out, because the "
            "position is the whole state of an epoch of indices"
        )


def require_divisible(batch_size: int, remainder: str) -> None:
    """Raises if an epoch cannot be divided into steps of this size, with this treatment of the last samples."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    if remainder not in get_args(Remainder):
        raise ValueError(f"remainder is {remainder!r}; it must be one of {', '.join(get_args(Remainder))}")
