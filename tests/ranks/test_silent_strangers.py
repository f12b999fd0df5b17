"""A rank is not delayed by processes of the same user that connect to its Unix socket and send nothing."""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta

import torch

import paceline as dist
from paceline.comm.engine.native import bootstrap

SILENT = 40  # each connection may take 5 s, so 40 in sequence would exceed the timeout
TIMEOUT = timedelta(seconds=60)


def meet_among_silent_strangers() -> None:
    strangers = []
    reach = bootstrap._connect

    def after_a_crowd(name: str, left_s: float) -> socket.socket:
        for _ in range(SILENT):
            strangers.append(reach(name, left_s))
        return reach(name, left_s)

    bootstrap._connect = after_a_crowd
    dist.init_process_group(timeout=TIMEOUT)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 3
    dist.destroy_process_group()
    for stranger in strangers:
        with contextlib.suppress(OSError):
            stranger.close()


def test_silent_strangers_hold_nobody_up(ranks):
    ranks(3)(meet_among_silent_strangers, timeout_s=80)
