"""Vaults as places: what `write_part` writes goes into several of them at once, and a checkpoint is read from any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paceline.checkpoint.copies.client import VaultClient
from paceline.checkpoint.format.manifest import FILE as MANIFEST
from paceline.errors import PacelineError

_READ_NBYTES = 32 << 20  # of one request


class CopyTarget:
    """Where a rank writes its part: into all of these vaults, in each of which `Begin` has been said."""

    def __init__(self, clients: Sequence[VaultClient], root: str, token: str) -> None:
        self._clients, self._root, self._token = clients, root, token

    def describe(self, name: str = "") -> str:
        """Returns what messages call a file."""
        return f"the copy in memory of {name.rpartition('/')[2] or self._root}"

    def free_nbytes(self) -> int | None:
        """Returns None: the vaults have been asked when the copy was begun."""
        return None

    def create(self, name: str) -> _Copied:
        """Makes a file."""
        return _Copied(self._clients, self._root, self._token, name.rpartition("/")[2])

    def sync_directory(self, name: str) -> None:
        """Does nothing: a vault has a file when it is finished."""


class _Copied:
    def __init__(self, clients: Sequence[VaultClient], root: str, token: str, file: str) -> None:
        self._clients, self._root, self._token, self._file = clients, root, token, file

    def write(self, views: Sequence[memoryview]) -> None:
        for client in self._clients:
            client.write(self._root, self._token, self._file, views)

    def commit(self) -> None:
        for client in self._clients:
            client.finish(self._root, self._token, self._file)

    def close(self) -> None:
        """Does nothing: what is not finished is forgotten with the connection."""


class CopySource:
    """A checkpoint whose files are in vaults, as a place that has this one only.

    Args:
        root: the directory on the disk that these are copies of.
        token: of the checkpoint.
        manifest: what its manifest's file would hold.
        files: their sizes.
        client_of: returns a connection to a vault that has a file.
    """

    def __init__(
        self,
        root: str,
        token: str,
        manifest: bytes,
        files: Mapping[str, int],
        client_of: Callable[[str], VaultClient],
    ) -> None:
        self._root, self._token, self._manifest, self._files = root, token, manifest, files
        self._client_of = client_of

    def describe(self, name: str = "") -> str:
        """Returns what messages call the checkpoint or a file of it."""
        return f"{self._root} in memory" + (f": {name}" if name else "")

    def free_nbytes(self) -> int | None:
        """Returns None: nothing is written here."""
        return None

    def size(self, name: str) -> int | None:
        """Returns a file's size in bytes; None if there is no such file."""
        return len(self._manifest) if name == MANIFEST else self._files.get(name)

    def open(self, name: str) -> _Text | _Held:
        """Opens a file for reading.

        Raises:
            FileNotFoundError: there is no such file.
        """
        if name == MANIFEST:
            return _Text(self._manifest)
        if name not in self._files:
            raise FileNotFoundError(f"there is no {name}")
        return _Held(self._root, self._token, name, self._files[name], self._client_of)

    def share(self, directory: str) -> _Text:
        """Does nothing: a checkpoint stays until the second one after it is begun."""
        return _Text(b"")


class _Text:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self) -> int:
        return len(self._data)

    def read_into(self, at: int, buffer: memoryview) -> int:
        part = self._data[at : at + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


class _Held:
    def __init__(self, root: str, token: str, file: str, nbytes: int, client_of: Callable[[str], VaultClient]) -> None:
        self._root, self._token, self._file, self._nbytes = root, token, file, nbytes
        self._client_of = client_of

    def size(self) -> int:
        return self._nbytes

    def read_into(self, at: int, buffer: memoryview) -> int:
        """Fills a buffer; a vault that is gone, or has given the file up, is one without the file."""
        done = 0
        try:
            while done < len(buffer):
                part = buffer[done : done + _READ_NBYTES]
                count = self._client_of(self._file).read_into(self._root, self._token, self._file, at + done, part)
                if count == 0:
                    break
                done += count
        except (OSError, PacelineError, ValueError) as error:
            raise FileNotFoundError(str(error)) from error
        return done

    def close(self) -> None:
        pass
