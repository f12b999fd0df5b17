"""Streams of numbers that implement different parts of the interfaces for resuming a loader."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset, get_worker_info


class Plain(IterableDataset):
    """Yields the numbers below `length`, without support for resuming."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class SplitsItself(Plain):
    """Gives each loader worker a part of the stream, as Hugging Face's streams do."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.length)[info.id :: info.num_workers] if info else range(self.length))


class Skips(Plain):
    """Can skip its first samples without producing them."""

    def __init__(self, length: int, first: int = 0) -> None:
        super().__init__(length)
        self.first = first

    def skip(self, count: int) -> Skips:
        return Skips(self.length, self.first + count)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.length))


class Advances(Plain):
    """Has an iterator that can skip samples; `made` contains the samples that were produced."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.made: list[int] = []

    def __iter__(self) -> AdvancingIterator:
        return AdvancingIterator(self.length, self.made)


class NumberIterator:
    """Iterates over the numbers from `place`; `made` contains those that it has yielded."""

    def __init__(self, length: int, made: list[int]) -> None:
        self.length = length
        self.made = made
        self.place = 0

    def __iter__(self) -> NumberIterator:
        return self

    def __next__(self) -> int:
        if self.place == self.length:
            raise StopIteration
        self.made.append(self.place)
        self.place += 1
        return self.place - 1


class AdvancingIterator(NumberIterator):
    def advance(self, count: int) -> int:
        passed = min(count, self.length - self.place)
        self.place += passed
        return passed


class RemembersOnItself(Plain):
    """Stores its state in attributes, as in torchdata's tutorial, and resumes where any of its iterators stopped."""

    place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < self.length:
            self.place += 1
            yield self.place - 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class KeepsItsDictionary(RemembersOnItself):
    """Keeps a reference to the dictionary that it loads, as Hugging Face's streams do."""

    def __setstate__(self, attributes: dict[str, object]) -> None:
        self.__dict__ = attributes


class RemembersInItsIterator(Plain):
    """Has an iterator with a state."""

    def __iter__(self) -> RememberingIterator:
        return RememberingIterator(self.length, [])


class RememberingIterator(NumberIterator):
    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class ShuffledByEpoch(Plain):
    """Has a different order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class SkipsInTheOrderOfTheEpoch(ShuffledByEpoch):
    """Loses track of the epoch when it skips samples, as Hugging Face's streams do."""

    first = 0

    def skip(self, count: int) -> SkipsInTheOrderOfTheEpoch:
        rest = SkipsInTheOrderOfTheEpoch(self.length)
        rest.first = count
        return rest

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.first, None)
