"""What to do about an object that cannot be sent."""

from __future__ import annotations

import dataclasses
import enum

import torch


def advice_for(value: object) -> str:
    """What `value` is, and what can be sent in its place."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return (
        f"a {name}, which does not travel between ranks; {_instead_of(value)}, or pass allow_pickle=True on every rank "
        "if you trust them all (a pickle can run any code where it is read)"
    )


def _instead_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "send a plain tensor (tensor.detach().as_subclass(torch.Tensor))"
    if dataclasses.is_dataclass(value):
        return "send dataclasses.asdict(it)"
    if isinstance(value, enum.Enum):
        return "send its .value"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "send its ._asdict()"
    for plain in (dict, list, tuple, str, bytes, int, float):
        if isinstance(value, plain):
            return f"send {plain.__name__}(it)"
    return "send a dict, list or tuple of what it holds"
