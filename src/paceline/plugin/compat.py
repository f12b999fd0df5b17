"""`paceline run --compat torch`: groups that torch.distributed makes with gloo use Paceline's engine.

All groups of torch.distributed are made in one function of its own, which is replaced here by one that passes on the
backend "paceline" in place of gloo. What the program asks about the group (`get_backend`) is answered as before, since
programs branch on it, and profiles and DDP's logging name the calls and the backend as before.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

_GLOO, _OURS = "gloo", "paceline"
_MIXES_FROM = (2, 14)  # the first release of torch in which a backend in Python can be one of several
_MAKER = "_new_process_group_helper"
_FIGURES = "_get_ddp_logging_data"


@functools.cache
def take_over() -> None:
    """Makes torch.distributed create Paceline's groups for CPU tensors wherever it would create gloo's; idempotent."""
    original = getattr(c10d, _MAKER)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options)
        asked = c10d.Backend(str(given.arguments["backend"]))
        has_options = any(given.arguments.get(name) is not None for name in ("backend_options", "pg_options"))
        ours = None if has_options else in_place_of(asked)
        if not given.arguments["global_ranks_in_group"] and given.arguments["group_rank"] == 0:
            _tell(asked, ours, given.arguments["group_size"], has_options)
        if ours is None:
            return original(*args, **options)
        given.arguments["backend"] = c10d.Backend(ours)
        group, store = original(*given.args, **given.kwargs)
        if group in c10d._world.pg_map:  # and not on a rank that is not in the group
            c10d._world.pg_map[group] = (asked, store)
            from paceline.plugin.part import part_of  # this module is loaded by `import torch`, before it is needed

            if (part := part_of(group)) is not None:
                part.stand_in_for(_GLOO)
        return group, store

    setattr(c10d, _MAKER, make)
    _name_as_asked()


def in_place_of(asked: str) -> str | None:
    """Returns the backend that takes the place of `asked`; None if that has nothing for Paceline to take over."""
    devices = dict(c10d.BackendConfig(c10d.Backend(asked)).get_device_backend_map())
    if devices.get("cpu") != _GLOO:
        return None
    of_gpus = devices.get("cuda") if torch.cuda.is_available() else None
    if of_gpus is None:
        return _OURS
    if release() >= _MIXES_FROM:
        return f"cpu:{_OURS},cuda:{of_gpus}"
    return _OURS if of_gpus == _GLOO else None


def release() -> tuple[int, int]:
    """Returns torch's release, such as (2, 13)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _name_as_asked() -> None:
    """Makes the logging data of torch's DistributedDataParallel name the backend that the program has named."""
    original: Callable[[DistributedDataParallel], dict[str, Any]] = getattr(DistributedDataParallel, _FIGURES)

    @functools.wraps(original)
    def figures(self: DistributedDataParallel) -> dict[str, Any]:
        found = original(self)
        if found.get("backend_name") == _OURS:
            found["backend_name"] = c10d.get_backend(self.process_group)
        return found

    setattr(DistributedDataParallel, _FIGURES, figures)


def _tell(asked: str, ours: str | None, size: int, has_options: bool) -> None:
    """Says in one line, on rank 0, what has become of the default group."""
    named = "no backend" if asked == "undefined" else f"the backend {asked}"
    who = f"paceline: --compat torch: torch.distributed's group of {size} ranks, for which the script names {named},"
    if ours is not None:
        text = f"{who} uses Paceline's engine for CPU tensors"
    elif has_options:
        text = f"{who} stays as it is, since it has pg_options, which are for that backend only"
    elif c10d.BackendConfig(c10d.Backend(asked)).get_device_backend_map().get("cpu") == _GLOO:
        text = (
            f"{who} stays as it is: with nccl beside it, this takes PyTorch 2.14 or newer (this is {torch.__version__})"
        )
    else:
        text = f"{who} stays as it is: it has no gloo, which Paceline would take the place of"
    print(text, file=sys.stderr, flush=True)
