"""Which backend torch.distributed takes where a program names none: Paceline's, while Paceline's default group exists.

torch's modules (`fully_shard`, `init_device_mesh`) make torch's default group by themselves where there is none. Beside
Paceline's it would otherwise be one of gloo's, without a word.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as torch_dist

_OURS, _TORCHS = "paceline", "gloo"


def offer() -> None:
    """Makes Paceline the default for CPU tensors, if the plug-in is registered and nobody chose another.

    Where there is a GPU torch's own default stays, which is for that.
    """
    if not torch_dist.is_available() or torch.cuda.is_available():
        return
    defaults = torch_dist.Backend.default_device_backend_map
    if _OURS in torch_dist.Backend.backend_list and defaults.get("cpu") == _TORCHS:
        defaults["cpu"] = _OURS
        logging.getLogger(__name__).info("torch.distributed takes the backend %r where a program names none", _OURS)


def withdraw() -> None:
    """Takes `offer` back; idempotent."""
    if torch_dist.is_available() and torch_dist.Backend.default_device_backend_map.get("cpu") == _OURS:
        torch_dist.Backend.default_device_backend_map["cpu"] = _TORCHS
