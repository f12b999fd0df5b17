"""Random numbers that belong to a shard of a step, whichever rank computes it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def random_stream(*key: int) -> Iterator[None]:
    """Returns a context in which torch (on CPU) and `random` draw from the stream of `key`; it restores their state."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    torch.default_generator.manual_seed(int.from_bytes(digest, "little"))
    random.seed(digest)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
