"""The thread that reads device times also polls calls that are added while it polls."""

from __future__ import annotations

import threading

import torch

from paceline.comm.engine.adapters.group_recorder import DeviceWatch


def test_what_is_added_during_its_last_poll_is_polled_again():
    watch, device, again = DeviceWatch(), torch.device("cpu"), threading.Event()
    polls = 0

    def poll() -> bool:
        nonlocal polls
        polls += 1
        if polls == 1:
            watch.add(poll, device)  # like a mark that is added right after the last one was read
        else:
            again.set()
        return False

    watch.add(poll, device)
    assert again.wait(30)
