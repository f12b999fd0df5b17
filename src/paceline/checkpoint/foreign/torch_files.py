"""What torch.save wrote: a file of tensors and plain values, read without running anything that it says."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from paceline.checkpoint.foreign.state import infos_of
from paceline.checkpoint.trees import take_apart
from paceline.errors import CheckpointDamagedError, CheckpointError


class TorchFile:
    """A file of torch.save. Tensors are mapped from it, so that each process reads only what it uses."""

    kind = "a file of torch.save"

    def __init__(self, path: Path) -> None:
        """Reads the file's structure.

        Raises:
            CheckpointError: it holds objects other than tensors and plain values.
            CheckpointDamagedError: it is cut.
        """
        self.path = str(path)
        self._tensors: dict[str, torch.Tensor] = {}
        self.tree = take_apart("", _load(path), self._tensors)
        self.tensors = infos_of(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor on the CPU."""
        return self._tensors[name].detach()


def _load(path: Path) -> object:
    try:
        return _load_mapped(path)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, and to unpickle objects is to run what the file says: "
            f"{reason} Save state_dicts; or, if you trust the file, convert it by "
            f"`torch.save(torch.load({str(path)!r}, weights_only=False)['model'].state_dict(), 'new.pt')` or the like"
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointDamagedError(f"{path} cannot be read as a file of torch.save: {error}") from error


def _load_mapped(path: Path) -> object:
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)  # older files cannot be mapped
