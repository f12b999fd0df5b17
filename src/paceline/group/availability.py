"""Which libraries there are for engines besides Paceline's own."""

from __future__ import annotations

import torch.distributed


def is_nccl_available() -> bool:
    """Whether Paceline can use NCCL: False, this version has no engine for CUDA tensors."""
    return False


def is_mpi_available() -> bool:
    """Whether Paceline can use an MPI library: False, this version has no engine for one."""
    return False


def is_gloo_available() -> bool:
    """Whether PyTorch was built with gloo.

    That is what an engine on it needs; `init_process_group` says which engines this version has. With CPU tensors
    the `paceline` engine does all that gloo does.
    """
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()
