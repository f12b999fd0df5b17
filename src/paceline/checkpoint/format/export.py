"""Writes tensors of a checkpoint as one safetensors file, which appears under its name when it is whole and durable."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from math import prod
from pathlib import Path

from paceline.checkpoint.format.checkpoint import Checkpoint, Progress
from paceline.checkpoint.format.dtypes import ITEMSIZE, nbytes_of
from paceline.checkpoint.format.headers import header_of
from paceline.checkpoint.format.local import LocalPlace
from paceline.checkpoint.format.places import OutputFile
from paceline.checkpoint.format.refusals import check_room, could_not
from paceline.checkpoint.format.regions import Flat

_CHUNK_NBYTES = 64 << 20


def export(
    checkpoint: Checkpoint, names: dict[str, str], target: str | os.PathLike[str], progress: Progress | None = None
) -> int:
    """Writes tensors into one file; returns its size in bytes.

    Args:
        checkpoint: that has them.
        names: of the tensors in the checkpoint, and their names in the file.
        target: the file; one that is there is replaced when the new one is whole.
        progress: called with the bytes of tensors written and the bytes in all.

    Raises:
        CheckpointDamagedError: the checkpoint does not hold what was written.
        CheckpointError: the file could not be written.
    """
    path = Path(target)
    place = LocalPlace(path.parent)
    entries = checkpoint.manifest.tensors
    ascending = sorted(names, key=lambda name: (-ITEMSIZE[entries[name].dtype], names[name]))
    header, _ = header_of([(names[name], entries[name].dtype, entries[name].shape) for name in ascending])
    total = sum(nbytes_of(entries[name].dtype, entries[name].shape) for name in ascending)
    check_room(place, len(header) + total)
    written = f".{path.name}.{secrets.token_hex(4)}"
    try:
        place.make_directory("")
        with contextlib.closing(place.create(written)) as file:
            file.write([memoryview(header)])
            _copy(checkpoint, ascending, file, total, progress)
            file.commit()
        place.rename(written, path.name)
        place.sync_directory("")
    except OSError as error:
        raise could_not("write", place, path.name, error) from error
    finally:
        place.remove(written)  # it is there only after an error
    return len(header) + total


def _copy(checkpoint: Checkpoint, names: list[str], file: OutputFile, total: int, progress: Progress | None) -> None:
    done = 0
    for name in names:
        for data in _chunks(checkpoint, name):
            file.write([memoryview(data)])
            done += len(data)
            if progress is not None:
                progress(done, total)


def _chunks(checkpoint: Checkpoint, name: str) -> Iterator[bytearray]:
    """Yields a tensor's bytes in parts, so that a large one needs little memory."""
    entry = checkpoint.entry(name)
    count, step = prod(entry.shape), _CHUNK_NBYTES // ITEMSIZE[entry.dtype]
    for start in range(0, count, step):
        yield checkpoint.read(name, Flat(start, min(start + step, count)))
