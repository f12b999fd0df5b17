"""The launcher's side of one connection: it does what a worker asks of the vault."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from paceline.checkpoint.copies.messages import (
    Address,
    Answer,
    Begin,
    Bytes,
    Commit,
    Done,
    Finish,
    GiveManifest,
    Inventory,
    Listen,
    Look,
    Read,
    Refused,
    Request,
    Write,
    receive_into,
    receive_request,
    send,
)
from paceline.checkpoint.copies.vault import RefusedError, Vault, new_file
from paceline.errors import PacelineError
from paceline.security.encryption import Connection, is_between_machines

_PIECE_NBYTES = 1 << 20  # received at a time
_MOST_READ_NBYTES = 64 << 20  # of one answer


class Session:
    """A worker that writes or reads; files that it has not finished are forgotten with it.

    Args:
        connection: to the worker.
        vault: the launcher's.
        identity: the vault's.
        listen: returns where other hosts reach the vault; it is asked by workers of this host only.
    """

    def __init__(self, connection: Connection, vault: Vault, identity: str, listen: Callable[[], str]) -> None:
        self._connection, self._vault, self._identity, self._listen = connection, vault, identity, listen
        self._open: dict[tuple[str, str, str], int] = {}
        self._faults: dict[tuple[str, str, str], str] = {}
        self._buffer = memoryview(bytearray(_PIECE_NBYTES))

    def run(self) -> None:
        """Answers requests until the worker closes the connection."""
        try:
            with contextlib.suppress(OSError, ValueError):  # the worker has died, or is none
                while (request := receive_request(self._connection)) is not None:
                    self._answer(request)
        finally:
            for descriptor in self._open.values():
                os.close(descriptor)

    def _answer(self, request: Request) -> None:
        if isinstance(request, Write):
            self._write(request)
            return
        payload = self._received(request.nbytes) if isinstance(request, Commit) else b""
        try:
            answer, data = self._done(request, payload)
        except (RefusedError, OSError, ValueError, MemoryError, PacelineError) as error:
            answer, data = Refused(str(error) or "there is no memory left"), b""
        send(self._connection, answer, [data] if data else [])

    def _done(self, request: Request, payload: bytes) -> tuple[Answer, bytes]:
        match request:
            case Listen():
                if is_between_machines(self._connection):
                    raise RefusedError("only workers of the vault's own host may ask for its address")
                return Address(self._identity, self._listen()), b""
            case Begin():
                self._vault.begin(request)
            case Finish():
                self._finish(request)
            case Commit():
                self._vault.commit(request, payload)
            case Look(root):
                return Inventory(self._identity, self._listen(), self._vault.look(root)), b""
            case GiveManifest():
                data = self._vault.manifest(request)
                return Bytes(len(data)), data
            case Read(count=count):
                if count > _MOST_READ_NBYTES:
                    raise RefusedError(f"{count} bytes are too many for one answer")
                data = self._vault.read(request)
                return Bytes(len(data)), data
        return Done(), b""

    def _write(self, write: Write) -> None:
        """Appends to a file; what goes wrong is said when the file is finished, since nobody waits for an answer."""
        key = write.root, write.token, write.file
        left = write.nbytes
        while left:
            piece = self._buffer[: min(left, _PIECE_NBYTES)]
            receive_into(self._connection, piece)
            left -= len(piece)
            if key in self._faults:
                continue
            try:
                if key not in self._open:
                    self._open[key] = new_file()
                _write_all(self._open[key], piece)
                self._vault.wrote(write.root, write.token, len(piece))
            except OSError as error:
                self._faults[key] = str(error)
                if key in self._open:
                    os.close(self._open.pop(key))  # memory may be what is short

    def _finish(self, finish: Finish) -> None:
        key = finish.root, finish.token, finish.file
        descriptor, fault = self._open.pop(key, None), self._faults.pop(key, None)
        if descriptor is None:
            raise RefusedError(fault or f"nothing was written of {finish.file}")
        nbytes = os.fstat(descriptor).st_size
        if fault is not None or nbytes != finish.total:
            os.close(descriptor)
            raise RefusedError(fault or f"{nbytes} instead of {finish.total} bytes of {finish.file} have come")
        self._vault.finish(finish, descriptor)

    def _received(self, nbytes: int) -> bytes:
        """Returns bytes that follow a request; memory is taken as they come, not for what is announced."""
        data = bytearray()
        while len(data) < nbytes:
            piece = self._buffer[: min(nbytes - len(data), _PIECE_NBYTES)]
            receive_into(self._connection, piece)
            data += piece
        return bytes(data)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
