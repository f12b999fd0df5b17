"""A terminal that shows what a launcher prints."""

from __future__ import annotations

import io

import pytest
from terminal import look

from paceline.operate.launch.workers.terminal import Screen


def bar(done: int) -> bytes:
    return b"\r%3d%%|%s|" % (done, (b"#" * (done // 10)).ljust(10))


class Shown:
    """A terminal and its screen."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        self.screen = Screen(lambda data: self._bytes.write(data), -1)

    def rows(self) -> list[str]:
        return look(self._bytes.getvalue().decode().replace("\n", "\r\n"))  # as the kernel does


@pytest.fixture
def shown():
    return Shown()


def nested(outer: int, inner: int) -> bytes:
    """Returns tqdm's output for two bars, one below the other."""
    return b"\n" + bar(inner) + b"\x1b[A" + bar(outer)
