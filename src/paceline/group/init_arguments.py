"""Checks the arguments of the functions that make process groups."""

from __future__ import annotations

import os

import torch

from paceline.engine.registry import Backend, choose
from paceline.group.wire import checked_kind
from paceline.store.base import Store


def require_elastic(
    backend: str | None, init_method: str | None, store: Store | None, world_size: int, rank: int
) -> None:
    """Requires arguments with which an elastic job can start.

    Raises:
        ValueError: an argument is given that the launcher decides, or the launcher does not run an elastic job.
    """
    if backend not in (None, "paceline", "cpu:paceline"):
        raise ValueError(
            f"backend is {backend!r} with elastic=True; elastic training runs on 'paceline' with CPU tensors. On "
            "'nccl' it would need a new communicator in every view, which has not been tried on GPUs"
        )
    if init_method is not None or store is not None or world_size >= 0 or rank >= 0:
        raise ValueError(
            "elastic=True excludes init_method, store, world_size and rank: the launcher says who takes part"
        )
    if "PACELINE_ELASTIC_FD" not in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"rank {os.environ.get('RANK', '?')}: elastic=True in a job of {os.environ['WORLD_SIZE']} ranks whose "
            "launcher is not elastic; start it with `paceline run --elastic`"
        )


def require_between(between_hosts: str | None, backend: Backend, algorithm: str | None) -> None:
    """Requires that `between_hosts` fits the other arguments.

    Raises:
        ValueError: it does not name one engine for CPU tensors, or the backend or the algorithm exclude it.
    """
    if between_hosts is None:
        return
    if choose(between_hosts).engines["cpu"] != between_hosts or backend.engines["cpu"] != "paceline":
        raise ValueError(
            f"between_hosts is {between_hosts!r} and the backend {backend.text!r}; it must be one engine for CPU "
            "tensors, beside 'paceline' for those of a host"
        )
    if algorithm not in (None, "hierarchical"):
        raise ValueError(f"between_hosts makes the algorithm hierarchical; algorithm={algorithm!r} excludes it")


def require_wire(wire: object, backend: Backend, between_hosts: str | None, elastic: bool = False) -> None:
    """Requires that a group's `wire` exists, and fits the other arguments.

    Raises:
        ValueError: it does not.
    """
    if wire is None:
        return
    kind = checked_kind(wire)
    if backend.engines["cpu"] != "paceline" or between_hosts is not None:
        raise ValueError(
            f"wire={kind!r} needs the engine 'paceline', also between the hosts; the backend is {backend.text!r} and "
            f"between_hosts {between_hosts!r}. Leave wire out, or leave them out"
        )
    if elastic:
        raise ValueError(f"wire={kind!r} excludes elastic=True: workers that come and go average gradients exactly")


def require_no_options(pg_options: None, call: str) -> None:
    """Requires that there are no options, which torch's backends have.

    Raises:
        ValueError: there are options.
    """
    if pg_options is not None:
        raise ValueError(f"{call}: pg_options is for engines that have options; leave it out")


def make_current(device_id: torch.device | int | None, backend: Backend) -> None:
    """Makes a CUDA device the current one; does nothing if `device_id` is None or another device.

    Raises:
        ValueError: the backend has no engine for the device.
    """
    if device_id is None:
        return
    device = torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)
    if device.type not in backend.engines:
        raise ValueError(
            f"device_id is {device_id}; the backend {backend.text!r} has no engine for {device.type}, leave it out"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
