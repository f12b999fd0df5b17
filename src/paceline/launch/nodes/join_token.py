"""A join token: where a job's machines meet and the secret that lets them in, as one word.

    pl1-<base32 of: length of the address, address, port, secret, CRC-32 of all before>

Whoever holds it may join the job, so it is as secret as a key.
"""

from __future__ import annotations

import base64
import binascii
import struct
import sys
import termios
from dataclasses import dataclass, field
from zlib import crc32

_PREFIX = "pl1-"
_PORT = struct.Struct(">H")
_CHECK = struct.Struct(">I")


class TokenError(ValueError):
    """The word is not a token, or not all of one."""


@dataclass(frozen=True)
class Token:
    """An address and a secret."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    def encode(self) -> str:
        """Returns the token as one word.

        >>> Token.decode(Token("10.0.0.1", 29400, b"s" * 32).encode()).port
        29400
        """
        host = self.host.encode()
        body = bytes([len(host)]) + host + _PORT.pack(self.port) + self.secret
        return _PREFIX + base64.b32encode(body + _CHECK.pack(crc32(body))).decode().rstrip("=").lower()

    @classmethod
    def decode(cls, word: str) -> Token:
        """Reads a token.

        Raises:
            TokenError: it is no token, or was cut or mistyped.
        """
        word = word.strip()
        if not word.startswith(_PREFIX):
            raise TokenError(
                f"a join token begins with {_PREFIX}; copy the one that `paceline run --print-token` printed"
            )
        text = word.removeprefix(_PREFIX).upper()
        try:
            raw = base64.b32decode(text + "=" * (-len(text) % 8))
            body, check = raw[: -_CHECK.size], raw[-_CHECK.size :]
            if _CHECK.unpack(check)[0] != crc32(body):
                raise TokenError("the join token is damaged or cut off; copy all of it")
            end = 1 + body[0]
            return cls(body[1:end].decode(), _PORT.unpack_from(body, end)[0], body[end + _PORT.size :])
        except (binascii.Error, struct.error, IndexError, UnicodeDecodeError):
            raise TokenError("the join token is damaged or cut off; copy all of it") from None


def read_token() -> str:
    """Returns the first line of stdin; at a terminal it is asked for, and not shown."""
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    shown = termios.tcgetattr(sys.stdin)
    hidden = [each & ~termios.ECHO if at == 3 else each for at, each in enumerate(shown)]
    print("join token: ", end="", file=sys.stderr, flush=True)
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, hidden)  # a line that was pasted with the command stays
    try:
        return sys.stdin.readline()
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, shown)
        print(file=sys.stderr)
