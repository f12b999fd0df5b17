"""The options of `bench/elastic.py`."""

from __future__ import annotations

from dataclasses import dataclass

Rows = list[dict[str, object]]


@dataclass(frozen=True)
class Options:
    """The options that determine the extent of the measurements.

    Attributes:
        workers: The number of workers in every job.
        steps: The number of steps of each job whose workers are killed.
        kills: The number of workers that are killed in the case `death`; other cases kill a tenth as many.
        rounds: The number of times that two loops alternate in `overhead` and `shards`.
        states: The sizes of the state in `join`, in MiB.
        models: The models used in `overhead` and `shards`.
        torchft: The path of a Python interpreter with torchft installed, or None.
        seed: The seed for all random instants and victims.
    """

    workers: int
    steps: int
    kills: int
    rounds: int
    states: tuple[int, ...]
    models: tuple[str, ...]
    torchft: str | None
    seed: int

    @property
    def few(self) -> int:
        """Returns the number of workers to kill for each row in cases other than `death`."""
        return max(2, self.kills // 10)
