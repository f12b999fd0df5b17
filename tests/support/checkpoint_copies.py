"""Two ranks on different hosts that copy their parts of a small state into both hosts' vaults.

Run as a program (`python checkpoint_copies.py DIRECTORY`), it kills chosen ranks at each failpoint of a copy, at their
n-th arrival for every n, and prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe, connection
from pathlib import Path

from checkpoint_states import WORLD_SIZE, pieces, steps_in_checkpoint

from paceline.errors import CheckpointError
from paceline.train.checkpoint.format.checkpoint import Checkpoint
from paceline.train.checkpoint.format.manifest import Draft
from paceline.train.checkpoint.format.values import encode
from paceline.train.checkpoint.peer_memory.client import dial
from paceline.train.checkpoint.peer_memory.protocol import Inventory
from paceline.train.checkpoint.peer_memory.server import CacheServer
from paceline.train.checkpoint.replicate import (
    FoundCheckpoint,
    ReplicaSource,
    Replication,
    newest_cached,
    replicate_checkpoint,
)
from paceline.train.elastic.failpoints import POINTS_OF_COPIES, arm

ROOT = "/checkpoints"
DEADLINE_S = 60


class PipeChannel:
    """A channel between two ranks over a pipe."""

    size = WORLD_SIZE

    def __init__(self, rank: int, other: connection.Connection) -> None:
        self.rank, self._other, self.me = rank, other, f"rank {rank}"

    def gather(self, mine: bytes) -> list[bytes]:
        if self.rank > 0:
            self._send(mine)
            return []
        return [mine, self._receive()]

    def broadcast(self, data: bytes) -> bytes:
        if self.rank > 0:
            return self._receive()
        self._send(data)
        return data

    def _send(self, data: bytes) -> None:
        try:
            self._other.send_bytes(data)
        except OSError as error:
            raise CheckpointError("the other rank has died") from error

    def _receive(self) -> bytes:
        assert self._other.poll(DEADLINE_S)
        try:
            return self._other.recv_bytes()
        except (EOFError, OSError) as error:
            raise CheckpointError("the other rank has died") from error


def copying_of(step: int, rank: int, keep: str | None, addresses: Sequence[str]) -> Replication:
    """Returns the replication of a rank's part; the vault on the rank's own host is the first in its list."""
    draft = Draft(f"step_{step:010d}", "", step, step, f"t{step}")
    values = encode({"step": step})
    assert isinstance(values, dict)
    order = [addresses[rank], addresses[1 - rank]]
    return Replication(ROOT, draft, keep, pieces(step, rank), values, order, {"a": "", "b": ""})


def copy_as(rank: int, step: int, keep: str | None, addresses: Sequence[str], channel: PipeChannel) -> None:
    replicate_checkpoint(
        copying_of(step, rank, keep, addresses),
        (channel, channel),
        dial,
    )


@contextmanager
def two_hosts(directory: Path) -> Iterator[list[str]]:
    """Yields the addresses of the vaults of two launchers."""
    with ExitStack() as stack:
        services = [stack.enter_context(closing(CacheServer(None))) for _ in range(2)]
        yield [service.open(str(directory / f"door-{host}"), None) for host, service in enumerate(services)]


def looked(addresses: Sequence[str], root: str = ROOT) -> list[Inventory]:
    """Returns the inventories of the vaults."""
    found = []
    for address in addresses:
        with closing(dial(address)) as client:
            found.append(client.look(root))
    return found


def steps_of(found: FoundCheckpoint, addresses: Sequence[str], root: str = ROOT) -> set[float]:
    """Returns the distinct numbers in a checkpoint that is read from these vaults; reading verifies all digests."""
    inventories = looked(addresses, root)
    where = {each.vault: address for each, address in zip(inventories, addresses, strict=True)}

    def holding(names: Sequence[str]) -> str:
        return next(where[name] for name in names if name in where)

    with ExitStack() as stack:
        clients = {address: stack.enter_context(closing(dial(address))) for address in addresses}
        manifest = clients[holding(found.describers)].manifest(root, found.token)
        source = ReplicaSource(
            root, found.token, manifest, found.files, lambda file: clients[holding(found.holders[file])]
        )
        with Checkpoint(source, "") as checkpoint:
            return steps_in_checkpoint(checkpoint)


@dataclass
class Outcome:
    """The outcome of both ranks: whether a rank reported a complete copy, and whether a rank was killed."""

    is_reported: bool
    is_killed: bool


def copy_by_both(step: int, keep: str | None, addresses: Sequence[str], orders: str = "") -> Outcome:
    """Copies with two processes; `orders` lists failpoints for the ranks "0" and "1"."""
    ends = Pipe()
    pids = []
    for rank in range(WORLD_SIZE):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ends[1 - rank].close()
                arm(str(rank), orders)
                copy_as(rank, step, keep, addresses, PipeChannel(rank, ends[rank]))
                code = 0
            except CheckpointError:
                code = 2
            finally:
                os._exit(code)
        pids.append(pid)
    for end in ends:
        end.close()
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    codes = [os.waitstatus_to_exitcode(status) for status in statuses]
    assert all(code in (0, 2, -9) for code in codes), (step, orders, codes)
    return Outcome(0 in codes, -9 in codes)


def sweep(addresses: Sequence[str], ranks: str, point: str) -> Iterator[int]:
    """Kills ranks at the 1st, 2nd, ... arrival at a failpoint until no rank is killed; checks the vaults each time."""
    step = count = 0
    while True:
        count, step = count + 1, step + 2
        assert copy_by_both(step - 1, None, addresses) == Outcome(is_reported=True, is_killed=False)
        orders = ",".join(f"{rank}:{point}@{count}=kill" for rank in ranks)
        outcome = copy_by_both(step, f"t{step - 1}", addresses, orders)
        found, _ = newest_cached(looked(addresses))
        assert found is not None, f"there is no whole copy after a kill at {orders}"
        assert found.step is not None
        assert found.step >= (step if outcome.is_reported else step - 1), orders
        assert steps_of(found, addresses) == {found.step}, orders
        assert all(len(each.entries) <= 2 for each in looked(addresses))
        if not outcome.is_killed:
            return
        yield count


def main(top: Path) -> dict[str, int]:
    """Returns the number of kills of each kind."""
    kills = {}
    for name, ranks in {"rank 0": "0", "rank 1": "1", "both": "01"}.items():
        directory = top / name.replace(" ", "")
        directory.mkdir()
        with two_hosts(directory) as addresses:
            for point in POINTS_OF_COPIES:
                kills[f"{name}, {point}"] = len(list(sweep(addresses, ranks, point)))
    return kills


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
