"""The first bytes of a connection to a gate: which number it is for. They are a wish, and prove nothing.

    connecting -> gate   header: magic, number; 64 bytes
    gate -> connecting   PASSED_ON, and all that follows is the holder's of the number; or NOBODY, and the end

The header is longer than what any of Paceline's other listeners reads before it decides, so that one that is no gate
refuses it at once.
"""

from __future__ import annotations

import struct

from paceline.security.handshake import HELLO_BYTES, is_hello

PASSED_ON = b"+"
NOBODY = b"-"

_MAGIC = b"paceln/p"
_HEADER = struct.Struct("<8sI52x")
HEADER_BYTES = _HEADER.size


def header_for(number: int) -> bytes:
    """Returns the header of a connection to a number."""
    return _HEADER.pack(_MAGIC, number)


def is_wrong(beginning: bytes) -> bool:
    """Returns whether what has come cannot become a header.

    >>> is_wrong(b""), is_wrong(header_for(7)[:5]), is_wrong(b"GET / HT")
    (False, False, True)
    """
    return beginning[: len(_MAGIC)] != _MAGIC[: len(beginning)]


def has_no_header(beginning: bytes) -> bool:
    """Returns whether this is the whole first message of a connection that does not know of the gate."""
    return len(beginning) >= HELLO_BYTES and is_hello(beginning)


def number_in(header: bytes) -> int:
    """Returns the number of a whole header."""
    number: int = _HEADER.unpack(header)[1]
    return number
