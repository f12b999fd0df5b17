"""Fixture for tests in one process: no test leaves a default process group for the next test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    """If the test left default groups, destroys them and fails the test."""
    yield
    left = destroy_default_groups()
    assert not left, f"the test left the default group of {' and '.join(left)}; destroy it even if the test fails"


def destroy_default_groups() -> list[str]:
    """Destroys the default groups of Paceline and torch.distributed; returns the names of the modules with a group."""
    left = []
    torchs = sys.modules.get("torch.distributed")
    if torchs is not None and torchs.is_available() and torchs.is_initialized():
        torchs.destroy_process_group()
        left.append("torch.distributed")
    default = sys.modules.get("paceline.comm.group.default")
    if default is not None and default.is_initialized():
        sys.modules["paceline.comm.group.init"].destroy_process_group()
        left.append("paceline")
    return left
