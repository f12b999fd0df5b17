"""Digests that tell whether bytes are those that were written. They withstand accidents, not an attacker.

XXH3 with 128 bits costs about as much as reading the memory. A cryptographic digest would cost several times as much
and would protect no better, because whoever can change a file can change the manifest beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from paceline.checkpoint.format.manifest import BLOCK_NBYTES

NAME = "xxh3_128"


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Returns the digest of bytes as hexadecimal text."""
    return xxhash.xxh3_128_hexdigest(data)


def blocks_of(data: memoryview, block_nbytes: int = BLOCK_NBYTES) -> Iterator[memoryview]:
    """Yields a piece's bytes in the blocks that have digests; one empty block for a piece without bytes."""
    for start in range(0, max(len(data), 1), block_nbytes):
        yield data[start : start + block_nbytes]
