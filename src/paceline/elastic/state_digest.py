"""The digest of a training's state: equal exactly if the state is, whatever its containers are and in which order.

It is the SHA-256 of the value's kind and its parts, each after its length; of what has elements, the parts are their
digests, so that no two states have the same bytes:

- a tensor: its type, its shape, and its elements in row-major order, wherever they were and in whichever strides;
- a dict or another mapping: its entries in the order of the bytes of their keys, and a set in that of its elements;
- a list, a tuple or a subclass of one: its elements in their order;
- None, a bool, an int, a float, a complex number, a text, bytes: its value, also of a subclass, as NumPy and
  enumerations have; an array of NumPy is a tensor;
- anything else: the text that `repr` returns.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

from paceline.parallel.digests import memory_of

_LENGTH_NBYTES = 8


def digest_of_state(value: object) -> str:
    """Returns the SHA-256 of a nested state, as 64 hexadecimal digits."""
    return _digest(value).hex()


def _digest(value: Any) -> bytes:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
            return _of_elements(value.dtype.name, value.shape, value.tobytes())
        value = value.tolist()
    if isinstance(value, torch.Tensor):
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        plain = dense.resolve_conj().resolve_neg()  # is kept as long as its memory is looked at
        return _of_elements(str(value.dtype).removeprefix("torch."), value.shape, memory_of(plain))
    kind, parts = _parts(value)
    return _joined(kind, *parts)


def _of_elements(dtype: str, shape: Sequence[int], elements: bytes | memoryview) -> bytes:
    return _joined(b"tensor", f"{dtype}{[*shape]}".encode(), elements)


def _parts(value: Any) -> tuple[bytes, list[bytes]]:
    """Returns the kind of a value, and the digests of what it consists of, or its text."""
    if isinstance(value, Mapping):
        entries = sorted((_digest(key), _digest(each)) for key, each in value.items())
        return b"mapping", [part for entry in entries for part in entry]
    if isinstance(value, (list, tuple)):
        return b"sequence", [_digest(each) for each in value]
    if isinstance(value, Set):
        return b"set", sorted(map(_digest, value))
    for kind, text_of in _PLAIN.items():
        if isinstance(value, kind):
            return kind.__name__.encode(), [text_of(value)]
    return b"other", [repr(value).encode()]


def _joined(*parts: bytes | memoryview) -> bytes:
    total = hashlib.sha256()
    for each in parts:
        total.update(len(each).to_bytes(_LENGTH_NBYTES, "little"))
        total.update(each)
    return total.digest()


_PLAIN: dict[type, Callable[[Any], bytes]] = {  # bool first, since it is an int
    bool: lambda value: str(value).encode(),
    int: lambda value: int.__repr__(value).encode(),
    float: lambda value: float.__repr__(value).encode(),
    complex: lambda value: complex.__repr__(value).encode(),
    str: lambda value: str.__str__(value).encode("utf-8", "surrogatepass"),
    bytes: bytes,
}
