"""The engines by name, and which of them serves which type of device."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from paceline.engine.api import Engine, EngineContext, EngineModule
from paceline.rendezvous.rendezvous import RendezvousResult


class _Entry(NamedTuple):
    device_type: str
    module: str
    meeting: str = ""  # the module with `meet`, for an engine whose launcher tells the ranks of each other


# A new engine is a module (`engine.EngineModule`) and a line here.
_ENGINES: Mapping[str, _Entry] = {
    "paceline": _Entry("cpu", "paceline.engine.native.engine"),
    "gloo": _Entry("cpu", "paceline.engine.gloo.engine"),
    "mpi": _Entry("cpu", "paceline.engine.mpi.engine", "paceline.engine.mpi.meeting"),
    "nccl": _Entry("cuda", "paceline.engine.nccl.engine"),
}
_FOR_CPU = "paceline"
_FOR_OTHERS = {"cuda": "nccl"}
_FORM = "one engine for each type of device is chosen like 'cpu:paceline,cuda:nccl'"


@dataclass(frozen=True)
class Backend:
    """What a `backend=` says: its text as `get_backend` returns it, and the engine by type of device."""

    text: str
    engines: Mapping[str, str]


def choose(backend: str | None) -> Backend:
    """What `backend` means: "mpi", "cpu:paceline,cuda:nccl", or with None the best that is there for each device.

    CPU tensors always have an engine, since objects travel in them: `paceline` where none is named.

    Raises:
        ValueError: there is no such engine, or it does not serve that device.
    """
    chosen: dict[str, str] = {}
    if backend is None:
        usable = [name for device_type, name in _FOR_OTHERS.items() if _is_there(device_type, name)]
        chosen = {"cpu": _FOR_CPU} | {_ENGINES[name].device_type: name for name in usable}
        return Backend(_spelled(chosen), chosen)
    for part in backend.lower().split(","):
        device_type, _, name = part.strip().rpartition(":")
        if name not in _ENGINES:
            raise ValueError(f"backend {backend!r} is not known; there are {', '.join(_ENGINES)}, and {_FORM}")
        served = _ENGINES[name].device_type
        if device_type not in ("", served):
            raise ValueError(f"backend {backend!r}: {name} takes tensors on {served}, not on {device_type}; {_FORM}")
        if served in chosen:
            raise ValueError(f"backend {backend!r} names two engines for {served}; {_FORM}")
        chosen[served] = name
    return Backend(_spelled(chosen), {"cpu": _FOR_CPU} | chosen)


def engines_for(device_type: str) -> list[str]:
    """The names of the engines that take tensors on such a device."""
    return [name for name, entry in _ENGINES.items() if entry.device_type == device_type]


def missing_piece(name: str) -> str | None:
    """What engine `name` needs and this machine lacks, with the fix; None if it can be used."""
    return _module(name).missing_piece() if name in _ENGINES else f"this version has no engine {name!r}"


def require(name: str, rank: int) -> None:
    """Refuses an engine that cannot be used here.

    Raises:
        ValueError: something is missing; the message names it and the fix.
    """
    missing = missing_piece(name)
    if missing is not None:
        raise ValueError(f"rank {rank}: backend {name!r} cannot be used: {missing}")


def start(name: str, context: EngineContext) -> Engine:
    """Starts an engine.

    Raises:
        ValueError: as for `require`.
    """
    require(name, context.rank)
    return _module(name).start(context)


def meeting(backend: Backend, rank: int) -> Callable[[float], RendezvousResult] | None:
    """What lets the ranks meet, where the launcher of an engine has made them known to each other; takes a time-out.

    Raises:
        ValueError: as for `require`.
    """
    for name in backend.engines.values():
        if _ENGINES[name].meeting:
            require(name, rank)
            return cast("Callable[[float], RendezvousResult]", importlib.import_module(_ENGINES[name].meeting).meet)
    return None


def _is_there(device_type: str, name: str) -> bool:
    return device_type == "cuda" and torch.cuda.is_available() and missing_piece(name) is None


def _spelled(engines: Mapping[str, str]) -> str:
    if len(engines) == 1:
        return next(iter(engines.values()))
    return ",".join(f"{device_type}:{name}" for device_type, name in engines.items())


def _module(name: str) -> EngineModule:
    return cast(EngineModule, importlib.import_module(_ENGINES[name].module))
