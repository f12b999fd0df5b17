"""Data from another process, which may be malformed in any way, as long as whoever reads it gets a `ValueError`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Data = TypeVar("Data")
T = TypeVar("T")


def decoded(decode: Callable[[Data], T], data: Data) -> T:
    """Returns what a decoder of JSON or msgpack makes of `data`.

    Decoders raise a `RecursionError`, which is no `ValueError`, for what is nested too deeply.

    Raises:
        ValueError: the data cannot be decoded.
    """
    try:
        return decode(data)
    except RecursionError:
        raise ValueError("the data is nested too deeply") from None


def writable(text: str) -> str:
    """Returns text that can be encoded: lone surrogates, which JSON can hold, are written as escapes.

    >>> writable("a\\ud800b")
    'a\\\\ud800b'
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
