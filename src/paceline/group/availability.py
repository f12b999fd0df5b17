"""Which libraries there are for engines besides Paceline's own."""

from __future__ import annotations

from paceline.engine.registry import missing_piece


def is_nccl_available() -> bool:
    """Whether backend="nccl" can be used here."""
    return missing_piece("nccl") is None


def is_mpi_available() -> bool:
    """Whether backend="mpi" can be used here."""
    return missing_piece("mpi") is None


def is_gloo_available() -> bool:
    """Whether backend="gloo" can be used here."""
    return missing_piece("gloo") is None
