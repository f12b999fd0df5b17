"""FsspecStorage: storage without renames, for object stores and other systems that fsspec supports.

The manifest is written after all other files. A directory is therefore complete if it has a manifest, and otherwise
unfinished. A digest detects whether the manifest itself is truncated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from paceline.errors import CheckpointError


class FsspecStorage:
    """The storage at an address such as s3://bucket/run, gs://bucket/run or memory://run."""

    renames = False

    def __init__(self, address: str) -> None:
        """Opens the file system of an address. Its settings are read by fsspec from the environment.

        Raises:
            CheckpointError: fsspec, or a package that it needs for this kind of address, is not installed; or fsspec
                rejects the address.
        """
        try:
            from fsspec.core import url_to_fs

            self._system, self._path = url_to_fs(address)
        except ImportError as error:
            raise CheckpointError(
                f"{address} needs packages that are not installed: pip install 'paceline[fsspec]', and what fsspec "
                f"needs for this kind of address ({error})"
            ) from error
        except ValueError as error:
            raise CheckpointError(f"{address} is no address that fsspec knows: {error}") from error
        self._address = address.rstrip("/")

    def describe(self, name: str = "") -> str:
        """Returns the full address of a name."""
        return f"{self._address}/{name}" if name else self._address

    def _full(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}" if name else self._path

    def names(self, directory: str = "") -> list[str]:
        """Returns the names in a directory, or [] if it does not exist."""
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._full(directory), detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in found]

    def size(self, name: str) -> int | None:
        """Returns the size of a file in bytes, or None if it does not exist."""
        self._system.invalidate_cache()
        try:
            info = self._system.info(self._full(name))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def make_directory(self, name: str) -> None:
        """Creates a directory if the store has directories."""
        self._system.makedirs(self._full(name), exist_ok=True)

    def create(self, name: str) -> _FsspecOutput:
        """Creates a file, which becomes visible at `commit` and replaces an existing file with this name."""
        return _FsspecOutput(self._system.open(self._full(name), "wb"))

    def open(self, name: str) -> _FsspecInput:
        """Opens a file for reading."""
        return _FsspecInput(self._system.open(self._full(name), "rb"))

    def sync_directory(self, name: str) -> None:
        """Does nothing: files that a store has accepted are durable."""

    def rename(self, old: str, new: str) -> None:
        """Raises OSError."""
        raise OSError(f"{self.describe(old)} cannot be renamed at once")

    def remove(self, name: str) -> None:
        """Removes a file, or a directory with its contents."""
        with contextlib.suppress(FileNotFoundError):
            self._system.rm(self._full(name), recursive=True)

    def free_nbytes(self) -> int | None:
        """Returns None: stores do not report free space."""
        return None

    def share(self, directory: str) -> _NoHold:
        """Does nothing: stores have no locks."""
        return _NoHold()

    def is_held(self, directory: str) -> bool:
        """Returns False: stores have no locks."""
        return False


class _NoHold:
    def close(self) -> None:
        pass


class _FsspecOutput:
    def __init__(self, file: Any) -> None:
        self._file = file
        self._is_committed = False

    def write(self, views: Sequence[memoryview]) -> None:
        for view in views:
            self._file.write(view)

    def commit(self) -> None:
        self._file.close()
        self._is_committed = True

    def close(self) -> None:
        """Discards an uncommitted file, because closing it would publish it."""
        if not self._is_committed:
            self._is_committed = True
            discard = getattr(self._file, "discard", None)
            if discard is not None:
                discard()


class _FsspecInput:
    def __init__(self, file: Any) -> None:
        self._file = file

    def size(self) -> int:
        return int(self._file.size)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        self._file.seek(offset)
        done = 0
        while done < len(buffer):
            data = self._file.read(len(buffer) - done)
            if not data:
                break
            buffer[done : done + len(data)] = data
            done += len(data)
        return done

    def close(self) -> None:
        self._file.close()
