"""Runs several modules at once, each on its device and in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch._utils import ExceptionWrapper

from paceline.parallel.scatter_gather import Device, to_device


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[object],
    kwargs_tup: Sequence[Mapping[str, object]] | None = None,
    devices: Sequence[Device] | None = None,
) -> list[object]:
    """Returns what each module returns for its inputs.

    The threads inherit the caller's grad mode, inference mode and autocast.

    Args:
        modules: one for each device.
        inputs: for each module a tuple of arguments, or a single argument.
        kwargs_tup: keyword arguments for each module.
        devices: the modules' devices, which errors name; a GPU becomes the current device of its thread.

    Raises:
        ValueError: the arguments have different lengths.
        Exception: the error that a module raised; its message names the replica and its device, and has the traceback.
    """
    keywords = [{}] * len(modules) if kwargs_tup is None else list(kwargs_tup)
    places = ["cpu"] * len(modules) if devices is None else list(devices)
    if not len(modules) == len(inputs) == len(keywords) == len(places):
        raise ValueError(
            f"parallel_apply got {len(modules)} modules, {len(inputs)} inputs, {len(keywords)} kwargs_tup and "
            f"{len(places)} devices; it needs as many of each"
        )
    results: list[object] = [None] * len(modules)
    in_mode = _ThreadModes()

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


class _ThreadModes:
    """The grad mode, inference mode and autocast of the thread that creates this."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        self._autocast_cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Applies these modes in another thread, which works on `device`."""
        with ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._autocast_cache))
            yield
