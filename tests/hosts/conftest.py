"""The fixture for tests that start launchers on hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hosts.machines import Machines, lent


@pytest.fixture
def machines() -> Iterator[Callable[..., Machines]]:
    """`machines(3)` creates three hosts, and can start launchers on them."""
    yield from lent(Machines)
