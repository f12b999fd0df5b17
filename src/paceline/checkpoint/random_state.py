"""The states of the random number generators of a process."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomState:
    """Stands for the random number generators of this process in a checkpoint: Python's, torch's and NumPy's.

    Each rank has its own, and gets it back when as many ranks load the checkpoint; further ranks get the first one's.

    Example::

        paceline.save({"model": model, "random": paceline.RandomState()}, "checkpoints")
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the generators."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
        if "numpy" in sys.modules:
            kind, keys, *rest = sys.modules["numpy"].random.get_state()
            state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the generators; one that the state lacks stays as it is."""
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        if "numpy" in state and "numpy" in sys.modules:
            kind, keys, *rest = state["numpy"]
            sys.modules["numpy"].random.set_state((kind, keys.numpy().astype("uint32"), *rest))
