"""Functions that report which extensions are available, and small helpers for lists and rank counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import torch

Entry = TypeVar("Entry")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises an ImportError unless the extension is `horovod.torch`."""
    if not extension_available(ext_name.removeprefix("horovod.")):
        raise ImportError(f"{ext_name} is not available: Paceline trains PyTorch programs")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns True if the extension is Horovod's PyTorch interface."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns True if PyTorch can use a GPU."""
    return extension_available(ext_base_name) and torch.cuda.is_available()


def gloo_built(verbose: bool = False) -> bool:
    """Returns True; see `paceline.horovod.gloo_built`."""
    return True


def mpi_built(verbose: bool = False) -> bool:
    """Returns False; see `paceline.horovod.mpi_built`."""
    return False


nccl_built = ddl_built = ccl_built = mpi_built


def num_rank_is_power_2(num_rank: int) -> bool:
    """Returns True if a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[Entry], n: int) -> list[Sequence[Entry]]:  # noqa: E741  # Horovod's name
    """Divides a list into `n` pieces of equal length. If this is impossible, the first pieces have one more entry."""
    share, more = divmod(len(l), n)
    starts = [at * share + min(at, more) for at in range(n + 1)]
    return [l[start:stop] for start, stop in pairwise(starts)]
