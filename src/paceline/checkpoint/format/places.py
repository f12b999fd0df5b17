"""What a checkpoint needs of where it is kept: a local directory, or an object store, which cannot rename.

Names are relative to the place, with slashes; "" is the place itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol


class OutputFile(Protocol):
    """A file that is being written."""

    def write(self, views: Sequence[memoryview]) -> None:
        """Appends bytes."""

    def commit(self) -> None:
        """Returns when all that was written survives the loss of power; nothing may be written after that."""

    def close(self) -> None:
        """Closes the file, whatever it holds; may be called again."""


class InputFile(Protocol):
    """A file that is read."""

    def size(self) -> int:
        """Returns the file's size in bytes."""

    def read_into(self, at: int, buffer: memoryview) -> int:
        """Fills a buffer from the byte `at` on; returns how many bytes there were, fewer only at the file's end."""

    def close(self) -> None:
        """Closes the file; may be called again."""


class Hold(Protocol):
    """Keeps a directory from being taken for abandoned, or from being removed, until it is closed."""

    def close(self) -> None:
        """Lets go; may be called again."""


class Described(Protocol):
    """Where something is, for messages. Each method may raise OSError."""

    def describe(self, name: str = "") -> str:
        """Returns the full path or address of a name, for messages."""

    def free_nbytes(self) -> int | None:
        """Returns how many bytes may still be written; None if that cannot be known."""


class Source(Described, Protocol):
    """What is needed to read a checkpoint."""

    def size(self, name: str) -> int | None:
        """Returns a file's size in bytes; None if there is no such file."""

    def open(self, name: str) -> InputFile:
        """Opens a file for reading."""

    def share(self, directory: str) -> Hold:
        """Keeps a checkpoint from being removed while it is read."""


class Target(Described, Protocol):
    """What a rank needs to write its part."""

    def create(self, name: str) -> OutputFile:
        """Makes a file that is not there yet; a place that does not rename replaces one, at `commit`."""

    def sync_directory(self, name: str) -> None:
        """Returns when the names in a directory survive the loss of power."""


class Place(Source, Target, Protocol):
    """Where a root is kept.

    Attributes: `renames`, whether a directory appears by one rename; if not, the manifest is written last instead.
    """

    renames: bool

    def names(self, directory: str = "") -> list[str]:
        """Returns the names in a directory; none if it is not there."""

    def make_directory(self, name: str) -> None:
        """Makes a directory and those above it; it survives the loss of power. It may be there already."""

    def rename(self, old: str, new: str) -> None:
        """Gives a file or directory another name at once; a file that had that name is replaced."""

    def remove(self, name: str) -> None:
        """Removes a file, or a directory with all that is in it; nothing if it is not there."""

    def is_held(self, directory: str) -> bool:
        """Returns whether a live process writes or reads this directory."""


def place_at(where: str | os.PathLike[str]) -> Place:
    """Returns the place of a path, or of an address such as s3://bucket/run, which needs `paceline[fsspec]`."""
    text = os.fspath(where)
    if "://" in text and not text.startswith("file://"):
        from paceline.checkpoint.format.remote import FsspecPlace

        return FsspecPlace(text)
    from paceline.checkpoint.format.local import LocalPlace

    return LocalPlace(text.removeprefix("file://"))
