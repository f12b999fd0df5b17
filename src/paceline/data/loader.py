"""A loader that can resume in mid-epoch, even with a different number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, get_args

from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data.order import Remainder, Share, epoch_order, shares
from paceline.data.sampler import which_part

Sample = TypeVar("Sample")


class StatefulLoader(Generic[Sample]):
    """Batches of this rank's part of `dataset`; an epoch can be resumed, even with a different number of ranks.

    An iteration yields the rest of the epoch; the next iteration after that is the next epoch, in another order. A
    batch counts as used once it was yielded: what the workers have read ahead does not. In a step the ranks
    take the next `world_size * batch_size` samples of the epoch's order together, so a state, taken at the same step
    on every rank, is a single position. Any number of ranks, with any batch size, can resume from there, and each
    sample is used exactly once.

    Args:
        dataset: a dataset with a length that can be indexed.
        batch_size: the number of samples of each rank in a step.
        shuffle, seed: permute the indices, seeded by `seed` plus the epoch; the same on every rank.
        num_replicas, rank: the number of parts and which to take; None for the default group's at each iteration.
        remainder: what to do with the samples at the end that do not fill a step. "share": divide them; if there are
            fewer than ranks, some ranks have one step less than others. "repeat": those ranks take a sample that
            another rank has as well. "drop": leave them out.
        num_workers, collate_fn, pin_memory, timeout, worker_init_fn, multiprocessing_context, prefetch_factor,
            persistent_workers: as for torch's DataLoader.

    Raises:
        TypeError: the dataset has no length or index.
        ValueError: `batch_size` is not positive, or an argument is refused by the DataLoader.

    >>> loader = StatefulLoader(range(8), batch_size=2, shuffle=False, num_replicas=2, rank=0)
    >>> batch = next(iter(loader))  # rank 1 has the samples 2 and 3
    >>> alone = StatefulLoader(range(8), batch_size=4, shuffle=False, num_replicas=1, rank=0)
    >>> alone.load_state_dict(loader.state_dict())
    >>> [batch.tolist() for batch in alone]
    [[4, 5, 6, 7]]
    """

    def __init__(
        self,
        dataset: Dataset[Sample],
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
        remainder: Remainder = "share",
        num_workers: int = 0,
        collate_fn: Callable[[list[Sample]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise TypeError(
                f"StatefulLoader got a {type(dataset).__name__}; it needs a dataset with __len__ and __getitem__, "
                "because samples are handed out, and remembered, by index"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if remainder not in get_args(Remainder):
            raise ValueError(f"remainder is {remainder!r}; it must be one of {', '.join(get_args(Remainder))}")
        if num_replicas is not None and rank is not None:
            which_part(num_replicas, rank)
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.num_replicas = num_replicas
        self.rank = rank
        self.remainder = remainder
        self.epoch = 0
        self._position = 0
        self._iteration = 0
        self._plan: list[Share] = []
        self._loader: DataLoader[Sample] = DataLoader(
            dataset,
            batch_sampler=_Batches(self),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:
        """Yields the rest of the epoch; an earlier iterator that was not exhausted ends."""
        self._iteration += 1
        return self._hand_out(self._iteration)

    def __len__(self) -> int:
        """Returns the number of batches that this rank has left in the epoch."""
        return len(self._shares_left())

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch: a different one begins at its start, the current one stays where it is."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._position = 0
            self._iteration += 1

    def state_dict(self) -> dict[str, int | bool]:
        """Returns the position in the epoch after the batches that were yielded so far, as a few numbers.

        It is the same on every rank, except while some ranks are in a last step that others do not have; rank 0 has
        all steps, so save rank 0's.
        """
        return {
            "epoch": self.epoch,
            "position": self._position,
            "length": len(self.dataset),
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Resumes where `state` was taken, with its seed.

        Raises:
            ValueError: the state was taken with another length of the dataset, or another `shuffle`.
        """
        length = len(self.dataset)
        if state["length"] != length or state["shuffle"] != self.shuffle:
            raise ValueError(
                f"the state is of {state['length']} samples with shuffle={state['shuffle']}, this loader has {length} "
                f"with shuffle={self.shuffle}; load it into a loader of the same dataset and order"
            )
        self.epoch = int(state["epoch"])
        self.seed = int(state["seed"])
        self._position = int(state["position"])
        self._iteration += 1

    def _shares_left(self) -> list[Share]:
        num_replicas, rank = which_part(self.num_replicas, self.rank)
        length = len(self.dataset)
        return list(shares(self._position, length, self.batch_size, num_replicas, rank, self.remainder))

    def _hand_out(self, iteration: int) -> Iterator[Any]:
        if iteration != self._iteration:
            return
        plan = self._plan = self._shares_left()
        # The DataLoader returns batches in the order in which it was asked for them.
        for share, batch in zip(plan, self._loader, strict=True):
            if iteration != self._iteration:
                return
            self._position = share.end
            yield batch
        if iteration == self._iteration:
            self.epoch += 1
            self._position = 0


class _Batches:
    """The indices of the remaining batches, for the DataLoader."""

    def __init__(self, owner: StatefulLoader[Any]) -> None:
        self._owner = owner

    def __iter__(self) -> Iterator[list[int]]:
        owner = self._owner
        order = epoch_order(len(owner.dataset), owner.shuffle, owner.seed, owner.epoch)
        return iter([[order[place] for place in share.places] for share in owner._plan])
