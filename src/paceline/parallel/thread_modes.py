"""What torch keeps for each thread, carried over to others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


class ThreadModes:
    """Whether the thread that makes this records gradients, and its autocast."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self._autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
        self._autocast_cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """The same in another thread, which works on `device`."""
        with ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self._autocast_cache))
            yield
