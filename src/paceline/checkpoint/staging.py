"""Copies of what a checkpoint is to hold, taken at once, so that the training may go on while it is written."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from paceline import _core
from paceline.checkpoint.captured import Held
from paceline.checkpoint.element_types import type_of
from paceline.checkpoint.format.direct import ALIGNMENT
from paceline.checkpoint.format.parts import in_files
from paceline.errors import CheckpointError

_CHUNK_NBYTES = 16 << 20  # that one thread copies at a time
_MOST_THREADS = 4  # more do not make memory faster


class Staging:
    """Memory for copies, which is used again for the next checkpoint: new memory costs more than the copy itself."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def copied(self, held: Sequence[Held]) -> list[Held]:
        """Returns what `held` is now, in this memory; earlier copies are overwritten.

        Raises:
            CheckpointError: there is no memory for the copies.
        """
        starts, total = _laid_out(held)
        if self._memory.numel() < total:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # the old memory goes first
            self._memory = _memory_of(total)
        copies = [
            self._memory[start : start + each.nbytes].view(type_of(each.dtype))
            for each, start in zip(held, starts, strict=True)
        ]
        _copy_all([(copy, each) for copy, each in zip(copies, held, strict=True)])
        return [replace(each, elements=_returning(copy)) for each, copy in zip(held, copies, strict=True)]


def _memory_of(nbytes: int) -> torch.Tensor:
    """Returns aligned memory, of huge pages where the system has them: a disk takes these in much larger pieces.

    Raises:
        CheckpointError: there is not so much.
    """
    try:
        memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CheckpointError(
            f"there is no memory for a copy of the {nbytes:,} bytes that this rank writes ({error.strerror}); with "
            "asynchronous=False none is needed"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _laid_out(held: Sequence[Held]) -> tuple[list[int], int]:
    """Returns where each copy begins, and the bytes of all: as in the files, so that they can be written directly."""
    starts: dict[int, int] = {}
    at = 0
    for members in in_files(held):
        at = -(-at // ALIGNMENT) * ALIGNMENT
        for each in members:
            starts[id(each)] = at
            at += each.nbytes
    return [starts[id(each)] for each in held], at


def _returning(tensor: torch.Tensor):  # type: ignore[no-untyped-def]
    return lambda: tensor


def _copy_all(pairs: Sequence[tuple[torch.Tensor, Held]]) -> None:
    threads = min(_MOST_THREADS, _cores_to_spare())
    if threads < 2 or sum(each.nbytes for _, each in pairs) < _CHUNK_NBYTES:
        for copy, held in pairs:
            copy.copy_(held.elements())
        return
    with ThreadPoolExecutor(threads, "paceline-copying") as pool:
        works = []
        for copy, held in pairs:
            elements = held.elements()
            size = max(1, _CHUNK_NBYTES // max(1, elements.element_size()))
            works += [pool.submit(a.copy_, b) for a, b in zip(copy.split(size), elements.split(size), strict=True)]
        for work in works:
            work.result()


def _cores_to_spare() -> int:
    """Returns how many cores this rank may use while the others of its host do the same."""
    return _core.usable_cores() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
