"""A safetensors file, such as one with a model's weights from a hub."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from paceline.checkpoint.element_types import type_of
from paceline.checkpoint.foreign.state import TensorInfo
from paceline.checkpoint.format.headers import Slot, length_of, read_header
from paceline.checkpoint.format.regular_files import open_regular
from paceline.checkpoint.format.values import TensorRef
from paceline.checkpoint.names import escaped
from paceline.errors import CheckpointDamagedError


class SafetensorsFile:
    """A safetensors file. Tensors are mapped from it, so that each process reads only what it uses."""

    kind = "a safetensors file"

    def __init__(self, path: Path) -> None:
        """Reads the file's header.

        Raises:
            CheckpointDamagedError: it is cut, or its header cannot be read.
        """
        self.path = str(path)
        self._slots = {escaped(slot.key): slot for slot in _slots_of(path)}
        self.tree = {slot.key: TensorRef(name) for name, slot in self._slots.items()}
        self.tensors = {name: TensorInfo(type_of(each.dtype), each.shape) for name, each in self._slots.items()}

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor on the CPU, mapped from the file."""
        slot = self._slots[name]
        dtype = self.tensors[name].dtype
        if slot.nbytes == 0:
            return torch.empty(slot.shape, dtype=dtype)
        mapped = torch.from_file(self.path, shared=False, size=slot.at + slot.nbytes, dtype=torch.uint8)
        found = mapped[slot.at :]
        if slot.at % dtype.itemsize:  # files of other writers need not align their tensors
            found = found.clone()
        return found.view(dtype).view(slot.shape)


def _slots_of(path: Path) -> list[Slot]:
    try:
        with open(open_regular(path, follows=True), "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            beginning = file.read(8)
            header = beginning + file.read(length_of(beginning) - len(beginning))
        slots = read_header(header)[0]
    except ValueError as error:
        raise CheckpointDamagedError(f"{path} cannot be read as a safetensors file: {error}") from None
    end = max((slot.at + slot.nbytes for slot in slots), default=len(header))
    if end > nbytes:
        raise CheckpointDamagedError(f"{path} is cut: it has {nbytes:,} bytes, and its tensors end at {end:,}")
    if end < nbytes:
        raise CheckpointDamagedError(f"{path} has {nbytes:,} bytes, and its tensors end at {end:,} already")
    return slots
