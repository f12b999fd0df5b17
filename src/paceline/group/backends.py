"""The names of backends, and which of them can be used here."""

from __future__ import annotations

import os

import torch

from paceline.engine.registry import choose, engines_for, missing_piece
from paceline.group.default import Group
from paceline.group.queries import get_backend
from paceline.group.reduce_op import ReduceOp, Reduction

_BEST = {"cpu": "paceline", "cuda": "nccl"}


class Backend(str):
    """The name of a backend in lower case: `Backend("GLOO")` is "gloo".

    >>> Backend.PACELINE, Backend("GLOO")
    ('paceline', 'gloo')
    """

    __slots__ = ()

    UNDEFINED = "undefined"
    PACELINE = "paceline"
    GLOO = "gloo"
    MPI = "mpi"
    NCCL = "nccl"

    backend_list = (UNDEFINED, PACELINE, GLOO, MPI, NCCL)
    default_device_backend_map = _BEST

    def __new__(cls, name: str) -> Backend:
        """Returns the name in lower case.

        Raises:
            ValueError: `name` is not a string.
        """
        if not isinstance(name, str):
            raise ValueError(f"Backend takes the name of a backend, not {name!r}")
        return super().__new__(cls, name.lower())


def is_backend_available(backend: str) -> bool:
    """Returns whether `backend`, such as "gloo" or "cpu:gloo,cuda:nccl", can be used here."""
    try:
        chosen = choose(backend)
    except ValueError:
        return False
    return all(missing_piece(name) is None for name in chosen.engines.values())


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Returns the backend for tensors on `device` that is used if a program names none.

    Raises:
        ValueError: there is no backend for that device.
    """
    device_type = torch.device(device).type
    best = _BEST.get(device_type)
    if best is None or best not in engines_for(device_type):
        raise ValueError(f"there is no backend for tensors on {device_type}; there are backends for {', '.join(_BEST)}")
    return best


def get_backend_config(group: Group = None) -> str:
    """Returns the group's backend for each type of device, such as "cpu:paceline,cuda:nccl".

    Raises:
        ValueError: this rank is not in the group.
    """
    chosen = choose(get_backend(group))
    return ",".join(f"{device_type}:{name}" for device_type, name in chosen.engines.items())


def is_nccl_available() -> bool:
    """Returns whether backend="nccl" can be used here."""
    return missing_piece("nccl") is None


def is_mpi_available() -> bool:
    """Returns whether backend="mpi" can be used here."""
    return missing_piece("mpi") is None


def is_gloo_available() -> bool:
    """Returns whether backend="gloo" can be used here."""
    return missing_piece("gloo") is None


def is_ucc_available() -> bool:
    """Returns False, since Paceline has no engine for backend="ucc"."""
    return False


def is_xccl_available() -> bool:
    """Returns False, since Paceline has no engine for backend="xccl"."""
    return False


def is_torchelastic_launched() -> bool:
    """Returns whether `paceline run` or torchrun started this process: both set TORCHELASTIC_RUN_ID."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def supports_complex(op: Reduction) -> bool:
    """Returns whether complex tensors can be reduced by `op`."""
    return op not in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
