"""Groups whose ranks are threads of this process, for tests that need several ranks but not their speed."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any

import torch

from paceline.comm.engine.channel import ReduceOp
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.group.call_plan import RankMap
from paceline.comm.group.process_group import ProcessGroup

_TIMEOUT_S = 60.0


class _Exchange:
    """Shared state in which the ranks of a group exchange objects."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self.brought: list[Any] = [None] * size
        self.mail: dict[tuple[int, int], Queue[list[torch.Tensor]]] = defaultdict(Queue)


class ThreadGroup(ProcessGroup):
    """One rank's side of a group, with the calls that saving, loading and wrapping use."""

    def __init__(self, exchange: _Exchange, rank: int, ranks: Sequence[int]) -> None:
        self._shared, self._rank = exchange, rank
        members = [RankIdentity(number, "localhost", os.getpid()) for number in ranks]
        self.rank_map = RankMap(members, rank, f"ThreadGroup({list(ranks)}, rank {rank})")
        self.ranks = self.rank_map.ranks

    def all_gather_bytes(self, data: bytes) -> list[bytes]:  # type: ignore[override]
        return self._exchange(data)

    def broadcast(self, tensors: Any, root: int = 0, **_: object) -> None:  # type: ignore[override]
        listed = _listed(tensors)
        for mine, theirs in zip(listed, self._exchange(listed)[root], strict=True):
            if self._rank != root:
                with torch.no_grad():
                    mine.copy_(theirs)
        self._shared.barrier.wait()

    def all_reduce(self, tensors: Any, op: ReduceOp = ReduceOp.SUM, **_: object) -> None:  # type: ignore[override]
        listed = _listed(tensors)
        everyone = self._exchange([each.clone() for each in listed])
        for number, tensor in enumerate(listed):
            together = torch.stack([own[number] for own in everyone])
            tensor.copy_(together.amax(0) if op == ReduceOp.MAX else together.sum(0))

    def all_gather(self, outputs: Any, tensors: Any, **_: object) -> None:  # type: ignore[override]
        for mine, theirs in zip(outputs, self._exchange(_listed(tensors)), strict=True):
            _copy(_listed(mine), theirs)
        self._shared.barrier.wait()

    def all_to_all(self, outputs: Any, inputs: Any, **_: object) -> None:  # type: ignore[override]
        for mine, theirs in zip(outputs, self._exchange(inputs), strict=True):
            _copy(_listed(mine), _listed(theirs[self._rank]))
        self._shared.barrier.wait()

    def send(self, tensors: Any, dst: int, tag: int = 0, async_op: bool = False) -> Any:  # type: ignore[override]
        self._shared.mail[self._rank, dst].put([each.clone() for each in _listed(tensors)])
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: Any, src: int, tag: int = 0, async_op: bool = False) -> None:  # type: ignore[override]
        for mine, theirs in zip(
            _listed(tensors), self._shared.mail[src, self._rank].get(timeout=_TIMEOUT_S), strict=True
        ):
            mine.copy_(theirs)

    def _exchange(self, mine: Any) -> list[Any]:
        self._shared.brought[self._rank] = mine
        self._shared.barrier.wait()
        everyone = list(self._shared.brought)
        self._shared.barrier.wait()
        return everyone


class ThreadMesh:
    """An array of ranks with groups along each dimension; `world` is the group of all ranks."""

    def __init__(self, *shape: int) -> None:
        self.size = int(torch.tensor(shape).prod())
        numbers = torch.arange(self.size).view(shape)
        self._exchanges: dict[tuple[int, ...], _Exchange] = {}
        self.groups = [
            [self._group(rank, numbers.movedim(dim, -1)) for dim in range(len(shape))] for rank in range(self.size)
        ]
        self.worlds = [self._group(rank, numbers.view(1, -1)) for rank in range(self.size)]

    def _group(self, rank: int, rows: torch.Tensor) -> ThreadGroup:
        ranks = next(tuple(row) for row in rows.reshape(-1, rows.size(-1)).tolist() if rank in row)
        exchange = self._exchanges.setdefault(ranks, _Exchange(len(ranks)))
        return ThreadGroup(exchange, ranks.index(rank), ranks)

    def run(self, program: Callable[[ThreadGroup, list[ThreadGroup]], Any]) -> list[Any]:
        """Calls `program` with its world and its groups in a thread for each rank; returns the results."""
        with ThreadPoolExecutor(self.size) as pool:
            running = [
                pool.submit(self._run_one, program, world, groups)
                for world, groups in zip(self.worlds, self.groups, strict=True)
            ]
        faults = [fault for each in running if (fault := each.exception()) is not None]
        causes = [each for each in faults if not isinstance(each, threading.BrokenBarrierError)]
        if faults:
            raise (causes or faults)[0]
        return [each.result() for each in running]

    def _run_one(self, program: Callable[..., Any], world: ThreadGroup, groups: list[ThreadGroup]) -> Any:
        try:
            return program(world, groups)
        except BaseException:
            for exchange in self._exchanges.values():
                exchange.barrier.abort()
            raise


def _copy(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    for output, value in zip(outputs, inputs, strict=True):
        output.copy_(value)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return tensors if isinstance(tensors, list) else [tensors]
