"""What the command line of `bench/elastic.py` says."""

from __future__ import annotations

from dataclasses import dataclass

Rows = list[dict[str, object]]


@dataclass(frozen=True)
class Options:
    """How much is measured.

    Attributes:
        workers: of every job.
        steps: of every job whose workers are killed.
        kills: how many workers are killed in the case `death`; a tenth of it in the others.
        rounds: how often two loops take turns in `overhead` and `shards`.
        states: the sizes of the state in `join`, in MiB.
        models: the models of `overhead` and `shards`.
        torchft: a Python that has torchft, or None.
        seed: of all random instants and victims.
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
        """How many workers are killed in each row of the other cases."""
        return max(2, self.kills // 10)
