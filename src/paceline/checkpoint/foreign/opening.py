"""Finds out what a file or directory is, by what it holds."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.checkpoint.foreign.state import Foreign
from paceline.checkpoint.format.headers import length_of
from paceline.checkpoint.format.regular_files import open_regular
from paceline.errors import CheckpointError

_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"  # with which torch.save's files of before torch 1.6 begin


def open_foreign(path: str | os.PathLike[str]) -> Foreign | None:
    """Returns what another library saved there; None if it is a directory that none of those known wrote.

    Raises:
        CheckpointError: the file is of no known kind, is damaged, or would have to be trusted to be read.
        FileNotFoundError: there is nothing.
    """
    where = Path(path)
    if where.is_dir():
        if not os.path.lexists(where / ".metadata"):
            return None
        from paceline.checkpoint.foreign.dcp import DcpDirectory

        return DcpDirectory(where)
    with open(open_regular(where, follows=True), "rb") as file:
        beginning = file.read(8)
    if beginning.startswith((_ZIP, _PICKLE)):
        from paceline.checkpoint.foreign.torch_files import TorchFile

        return TorchFile(where)
    try:
        length_of(beginning)
    except ValueError:
        raise CheckpointError(
            f"{where} is neither a checkpoint of Paceline, nor a file of torch.save or safetensors: it begins with "
            f"{beginning!r}"
        ) from None
    from paceline.checkpoint.foreign.safetensors_files import SafetensorsFile

    return SafetensorsFile(where)
