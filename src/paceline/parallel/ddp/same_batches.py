"""Detects that ranks read the same batches, without a collective of its own.

In the first few steps, a vector with an element for each rank is sent along with the gradients. Each rank writes a
digest of its inputs to its own element, and zeros to the others, so the average contains all ranks' digests.
"""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from collections.abc import Sequence

import torch

from paceline.group.process_group import ProcessGroup
from paceline.parallel.ddp.gradients import Memory
from paceline.parallel.graph import find_first_tensors
from paceline.wording import and_more

_LOOKS = 3  # the number of steps whose digests must agree for a warning
_DIGEST_BITS = 20  # exact in float32, also when divided by the number of ranks
_MOST_NAMED = 8  # ranks in the warning
_MOST_BYTES = 1 << 16  # the part of each tensor that is hashed


class SameBatches:
    """Compares the ranks' batches in the first steps; afterwards `is_over` is true.

    Args:
        group: the ranks.
        on_cpu: whether the gradients are on the CPU. Batches are not compared on a GPU, which would have to wait.
    """

    def __init__(self, group: ProcessGroup, on_cpu: bool) -> None:
        self.is_over = group.size() == 1 or not on_cpu
        self._group = group
        self._mine: int | None = None
        self._sent: torch.Tensor | None = None
        self._seen: list[list[float]] = []

    def look(self, inputs: object) -> None:
        """Computes the digest of a forward's inputs."""
        self._mine = digest(inputs)

    def look_away(self) -> None:
        """Drops the digest, on a rank that has no inputs in this step."""
        self._mine = None

    def add_to(self, memory: Memory, dtype: torch.dtype) -> None:
        """Adds the digest to gradients of `dtype`, if that dtype can represent it exactly."""
        if self.is_over or dtype not in (torch.float32, torch.float64):
            return
        self._sent = torch.zeros(self._group.size(), dtype=dtype, device="cpu")
        # Without a digest, the rank sends a number that no other rank sends.
        self._sent[self._group.rank()] = -1 - self._group.rank() if self._mine is None else self._mine
        memory.pieces += (self._sent.data_ptr(), self._sent.nbytes)
        memory.tensors = [*memory.tensors, self._sent]
        memory.count += len(self._sent)

    def arrive(self) -> None:
        """Reads the digests after the gradients that they were added to were averaged."""
        if self._sent is None:
            return
        self._seen.append(self._sent.tolist())
        self._sent = None
        if len(self._seen) == _LOOKS:
            self.is_over = True
            self._tell()

    def _tell(self) -> None:
        histories = list(zip(*self._seen, strict=True))
        me = self._group.rank()
        if min(histories[me]) < 0:
            return
        alike = [rank for rank, history in enumerate(histories) if history == histories[me]]
        if len(alike) > 1 and alike[0] == me:
            ranks = [self._group.ranks[rank] for rank in alike]
            named = and_more(ranks, _MOST_NAMED) if len(ranks) > _MOST_NAMED else _listed(ranks)
            warnings.warn(
                f"ranks {named} read the same batches: their first {_LOOKS} "
                "batches were equal, so they compute the same gradients, and training gains nothing from the "
                "additional ranks. Give the DataLoader sampler=paceline.DistributedSampler(dataset), or use another "
                "seed for the batches on each rank",
                stacklevel=2,
            )


def _listed(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def digest(inputs: object) -> int | None:
    """Returns a digest of the tensors in `inputs`, None if each is constant or one is not on the CPU."""
    hashed = hashlib.blake2b(digest_size=8)
    tells = False
    for tensor in find_first_tensors(inputs):
        if tensor is None:
            break
        if tensor.layout is not torch.strided or tensor.is_nested or not tensor.is_cpu:
            return None
        flat = tensor.detach().reshape(-1)[: _MOST_BYTES // tensor.element_size()].contiguous()
        flat = flat.resolve_conj().resolve_neg()
        data = ctypes.string_at(flat.data_ptr(), flat.nbytes)
        hashed.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        hashed.update(data)
        tells = tells or (len(flat) > 1 and data != data[: flat.element_size()] * len(flat))
    return int.from_bytes(hashed.digest(), "big") % (1 << _DIGEST_BITS) if tells else None
