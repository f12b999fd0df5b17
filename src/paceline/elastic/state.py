"""What a training loop needs in order to go on when workers die, leave or join."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch

from paceline.elastic import failpoints
from paceline.elastic.connection import LauncherConnection, same_bits_as
from paceline.elastic.messages import Leaving
from paceline.elastic.registry import Registry, Stateful
from paceline.elastic.rounds import Rounds
from paceline.parallel.sharded.logical import LogicalShards


class ElasticState:
    """Keeps the state of a training run through the deaths, departures and arrivals of workers.

    The loop is that of `LogicalShards` with `ShardLoader`. When a worker dies in the middle of a step, the others
    compute its shards of that step and go on; none of them is restarted. A worker that comes late runs the script from
    the top, is given the state in `epochs`, and takes part from the next step on. Since a step depends on the number of
    shards and not on that of workers, the results have the same bits as those of one process that nothing disturbed.

    Start the script with `paceline run --elastic`. Started without, it is a job of this one process.

    What the script does before `epochs` it does on each worker by itself, since a worker that comes late has nobody to
    do it with: the default process group has one rank until then. Between taking a batch from the loader and calling
    `shards.backward` nothing may change the state; schedulers step after the optimizer. A loop that is resumed in the
    middle of an epoch runs the lines before the loader's `for` again.

    Args:
        shards: the logical shards, which hold the model.
        others: everything else that has a state, by name: the optimizer, the scheduler, the loader, ....

    Raises:
        TypeError: one of the others has no state_dict and load_state_dict.

    Example::

        paceline.init_process_group(elastic=True)
        shards = paceline.LogicalShards(model, 8)
        loader = paceline.ShardLoader(dataset, batch_size=4, shards=shards)
        state = paceline.ElasticState(shards, optimizer=optimizer, loader=loader)
        for epoch in state.epochs(20):
            for batches in loader:
                optimizer.zero_grad()
                shards.backward(lambda xy: loss_function(model(xy[0]), xy[1]), batches)
                optimizer.step()
    """

    def __init__(self, shards: LogicalShards, **others: Stateful) -> None:
        self._shards = shards
        self._epoch = 0
        self._registry = Registry(shards.module, {**others, "epoch": self})
        self._rounds: Rounds | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, from 0."""
        return self._epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the epochs from the current one to before `count`, and returns when all workers have finished them.

        Raises:
            DivergenceError: workers that should have the same results have not.
            SystemExit: this worker was asked to leave, or the launcher has no use for it.
        """
        connection = LauncherConnection.of_environment()
        if connection is not None:
            self._join(connection)
        while self._epoch < count:
            yield self._epoch
            self._epoch += 1
        if self._rounds is not None:
            self._rounds.finish()

    def digest(self) -> str:
        """Returns the SHA-256 of the whole state, as 64 hexadecimal digits; it is the same on every worker."""
        return self._registry.digest()

    def state_dict(self) -> dict[str, int]:
        """Returns the number of the current epoch."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues with the epoch of `state`."""
        self._epoch = state["epoch"]

    def _join(self, connection: LauncherConnection) -> None:
        failpoints.arm_by_environment(connection.name)
        shards = self._shards

        def deal(mine: range) -> None:
            shards.mine = mine

        rounds = self._rounds = Rounds(shards.count, connection, self._registry, deal)
        shards.sum_by(rounds, rounds.begin_batch)
        if threading.current_thread() is threading.main_thread():
            _leave_on_sigterm(connection, rounds)
        rounds.join(_fingerprint(shards))


def _leave_on_sigterm(connection: LauncherConnection, rounds: Rounds) -> None:
    """Makes the first SIGTERM a request to leave at the end of the batch, and the second one final."""

    def leave(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        rounds.is_leaving = True
        connection.send(Leaving("SIGTERM"))

    signal.signal(signal.SIGTERM, leave)


def _fingerprint(shards: LogicalShards) -> str:
    """Returns what must be equal on two workers for their results to have the same bits."""
    described = [
        (name, tuple(tensor.shape), tensor.dtype)
        for name, tensor in [*shards.module.named_parameters(), *shards.module.named_buffers()]
    ]
    return same_bits_as(
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        shards.count,
        shards.seed,
        described,
    )
