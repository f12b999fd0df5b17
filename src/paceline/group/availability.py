"""Which libraries there are for engines besides Paceline's own."""

from __future__ import annotations


def is_nccl_available() -> bool:
    """Whether Paceline can use NCCL: False, this version has no engine for CUDA tensors."""
    return False


def is_mpi_available() -> bool:
    """Whether Paceline can use an MPI library: False, this version has no engine for one."""
    return False


def is_gloo_available() -> bool:
    """Whether Paceline can use torch's gloo: False; with CPU tensors the `paceline` engine does all that gloo does."""
    return False
