"""Runs several modules at once, each on its device and in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from torch import nn
from torch._utils import ExceptionWrapper

from paceline.parallel.scatter_gather import Device, to_device
from paceline.parallel.thread_modes import ThreadModes


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[object],
    kwargs_tup: Sequence[Mapping[str, object]] | None = None,
    devices: Sequence[Device] | None = None,
) -> list[object]:
    """What each module returns for its inputs: a tuple of arguments each, or a single one.

    The threads take over whether gradients are recorded, and autocast.

    Args:
        modules, inputs: as many of the one as of the other.
        kwargs_tup: keyword arguments for each.
        devices: for messages, and to be made current where they are GPUs.

    Raises:
        ValueError: the numbers differ.
        Exception: whatever a module raised; the message has the replica, its device and the traceback.
    """
    keywords = [{}] * len(modules) if kwargs_tup is None else list(kwargs_tup)
    places = ["cpu"] * len(modules) if devices is None else list(devices)
    if not len(modules) == len(inputs) == len(keywords) == len(places):
        raise ValueError(
            f"parallel_apply got {len(modules)} modules, {len(inputs)} inputs, {len(keywords)} kwargs_tup and "
            f"{len(places)} devices; it needs as many of each"
        )
    results: list[object] = [None] * len(modules)
    in_mode = ThreadModes()

    def run(at: int) -> None:
        device = to_device(places[at])
        given = inputs[at]
        arguments = given if isinstance(given, (list, tuple)) else (given,)
        try:
            with in_mode.entered(device):
                results[at] = modules[at](*arguments, **keywords[at])
        except Exception:
            results[at] = ExceptionWrapper(where=f"in replica {at} on device {device}")

    if len(modules) == 1:
        run(0)
    else:
        threads = [threading.Thread(target=run, args=(at,), name=f"replica {at}") for at in range(len(modules))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for result in results:
        if isinstance(result, ExceptionWrapper):
            result.reraise()
    return results
