"""Invalid arguments for calls that must reject them without terminating the process."""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import nn

NUMBERS = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 255, 256, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64, 2**200]
FLOATS = [0.0, -1.0, 0.5, 1e308, float("inf"), float("-inf"), float("nan")]
DTYPES = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
SHAPES = [(), (0,), (1,), (2,), (4,), (6,), (2, 2), (2, 0, 3), (70_001,), (1, 3, 4, 4)]
SOON = [timedelta(0), timedelta(seconds=-1), timedelta(microseconds=1), timedelta(seconds=0.1)]


class Journal:
    """Writes each call to a file before it is made; the last line identifies a call that terminated the process."""

    def __init__(self, path: str) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._file = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 300)  # a call may close any descriptor in NUMBERS
        os.close(file)

    def note(self, text: str) -> None:
        text = f"{time.monotonic():.1f} {text}".replace("\n", " ")
        os.write(self._file, text.encode(errors="replace")[:2000] + b"\n")


def last_line(path: str) -> str:
    with open(path, errors="replace") as file:
        return next((line for line in reversed(file.read().splitlines()) if line), "none")


class Hostile:
    """Chooses values from a seed; ranks with the same seed choose the same values.

    Attributes:
        spares_torch: True if the values are first passed to torch's own code, which is not under test. Tensors then
            have valid memory, because torch prints them in its errors, and at least one dimension, because torch
            splits the first one.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.spares_torch = False
        self._kinds: list[Callable[[], object]] = [
            lambda: None,
            lambda: self.random.choice(NUMBERS),
            lambda: self.random.choice(FLOATS),
            lambda: self.random.choice([True, "", "x", "\0", "é" * 1000, b"", b"x\0", ..., object(), type, int]),
            lambda: self.random.choice(SOON),
            lambda: torch.device("meta"),
            lambda: self.random.choice(DTYPES),
            dict,
            lambda: {"a": 1},
            self.tensor,
            self.tensor,
            self.tensors,
            lambda: [self.tensors(), self.tensors()],
            lambda: [self.random.choice(NUMBERS) for _ in range(self.random.randrange(4))],
            lambda: [None],
            lambda: lambda *_: None,
        ]

    def value(self) -> object:
        return self.random.choice(self._kinds)()

    def tensors(self) -> object:
        count = self.random.choice([0, 1, 2, 2, 2, 3])
        tensor = self.tensor()
        made = [tensor if self.random.random() < 0.5 else self.tensor() for _ in range(count)]
        return self.random.choice([list, tuple])(made)

    def tensor(self) -> torch.Tensor:
        choose = self.random.choice
        dtype, shape = choose(DTYPES), choose(SHAPES[self.spares_torch :])
        try:
            tensor = torch.empty(shape, dtype=dtype).fill_(1)
        except (RuntimeError, TypeError):  # it cannot be filled, or cannot be created from shape and type alone
            tensor = torch.ones(shape)
        change = choose(
            [
                lambda t: t,
                lambda t: t,
                lambda t: t.to("meta"),
                lambda t: t.to_sparse(),
                lambda t: t.to_sparse_csr(),
                lambda t: t.expand(3, *t.shape),
                lambda t: t.t(),
                lambda t: t[::2],
                lambda t: t.conj(),
                lambda t: torch._neg_view(t),
                lambda t: t.to(memory_format=torch.channels_last),
                lambda t: t.as_strided((4,), (0,)),
                lambda t: t.requires_grad_(),
                lambda t: nn.Parameter(t),
                lambda t: t.new_empty(0).set_(),
                torch.clone if self.spares_torch else _without_memory,
                lambda t: torch.nested.nested_tensor([t.float().reshape(-1), t.float().reshape(-1)[:1]]),
                lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
                lambda t: t.view(torch.uint8),
                _for_inference,
                lambda t: t.to_mkldnn(),
            ]
        )
        try:
            changed: torch.Tensor = change(tensor)
        except (RuntimeError, TypeError, IndexError, NotImplementedError):  # not possible for this type or shape
            return tensor
        return changed

    def instead_in(self, arguments: Sequence[object]) -> list[object]:
        """Returns the arguments with one or two of them replaced, removed or added."""
        changed = list(arguments)
        for _ in range(self.random.choice([1, 1, 2])):
            at = self.random.randrange(len(changed) + 1)
            way = self.random.random()
            if at < len(changed) and way < 0.8:
                changed[at] = self._other(changed[at])
            elif at < len(changed) and way < 0.9:
                del changed[at]
            else:
                changed.insert(at, self.value())
        return changed

    def _other(self, argument: object) -> object:
        """Returns a different value, usually of the same type."""
        if self.random.random() < 0.3:
            return self.value()
        if isinstance(argument, int):
            return self.random.choice(NUMBERS)
        if isinstance(argument, torch.Tensor):
            return self.tensor()
        if isinstance(argument, (list, tuple)) and argument:
            inside = list(argument)
            at = self.random.randrange(len(inside))
            inside[at] = self._other(inside[at])
            return inside if self.random.random() < 0.7 else inside[:at]
        return self.value()


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def _for_inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


def shown(value: object, depth: int = 2) -> str:
    """Returns a description of a value, without reading a tensor's memory."""
    if isinstance(value, torch.Tensor):
        shape = "nested" if value.is_nested else list(value.shape)
        return f"{type(value).__name__}({value.dtype}, {value.layout}, {value.device}, {shape})"
    if isinstance(value, (list, tuple)) and depth:
        return f"[{', '.join(shown(each, depth - 1) for each in value)}]"
    return type(value).__name__ if isinstance(value, (list, tuple, dict)) else repr(value)[:100]
