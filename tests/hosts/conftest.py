"""The fixture of the tests that start launchers on hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hosts.machines import Machines, lent


@pytest.fixture
def machines() -> Iterator[Callable[..., Machines]]:
    """`machines(3)` makes three hosts, on which it starts launchers."""
    yield from lent(Machines)
