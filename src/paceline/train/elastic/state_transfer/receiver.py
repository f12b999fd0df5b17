"""The receiver of a state transfer, which requests chunks from all senders concurrently and verifies each chunk.

`ViewAdmission` requests the admission of a worker without state. The worker enters a view either directly or after a
transfer.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline.comm.group.buffers import as_memory, empty_buffers
from paceline.comm.group.collectives.object_codec import MalformedPayload, decode
from paceline.comm.one_port.dialer import dial
from paceline.comm.security.encryption import Connection
from paceline.comm.security.handshake import PeerHello, connect_with_key
from paceline.comm.security.secret import derive_key, job_secret
from paceline.errors import AuthenticationError
from paceline.train.elastic.failpoints import failpoint
from paceline.train.elastic.launcher_connection import LauncherConnection
from paceline.train.elastic.process_priority import lower_thread_priority
from paceline.train.elastic.protocol import ExitRequest, TransferOffer, View, WorkerReady
from paceline.train.elastic.state_transfer.sender import KEY
from paceline.train.elastic.state_transfer.transfer_protocol import (
    CHANNEL,
    CHUNK_BYTES,
    REQUEST,
    BrokenTransferError,
    ChunkLayout,
    MissingChunks,
    RequestKind,
    SnapshotChunk,
    SnapshotContents,
    digest_of_chunk,
    receive_head,
    receive_into,
)

_PATIENCE_S = 30.0  # maximum pause within a message from a sender
_DUPLICATE_S = 1.0  # time for a sender to finish a chunk that another sender has already delivered
_LOOK_S = 0.02


class ReceivedState:
    """The result of a transfer: the state, its description, and the connections that serve later results."""

    def __init__(self, contents: SnapshotContents, state: Any, senders: list[Connection]) -> None:
        self.contents = contents
        self.senders = senders
        self._state = state

    def take_state(self) -> Any:
        """Returns the state and drops this object's reference to it, so that its memory can be freed."""
        state, self._state = self._state, None
        return state


class _ReceiveBuffers:
    """The memory that receives the state, allocated when the first sender announces the size of the state."""

    def __init__(self, contents: SnapshotContents) -> None:
        self.contents = contents
        self.buffers = empty_buffers(contents.sizes)
        self.memories = [as_memory(buffer) for buffer in self.buffers]
        self.layout = ChunkLayout(contents.sizes, CHUNK_BYTES)
        self.chunks = MissingChunks(self.layout.count)


class StateReceiver:
    """Receives the state of one transfer.

    Args:
        offers: A function that returns the senders' offers received so far.
        is_needless: A function that is called regularly and returns True once the state is no longer needed.
    """

    def __init__(self, offers: Callable[[], Sequence[TransferOffer]], is_needless: Callable[[], bool]) -> None:
        self._offers, self._is_needless = offers, is_needless
        self._changed = threading.Condition()
        self._room: _ReceiveBuffers | None = None
        self._tried: dict[str, threading.Thread] = {}
        self._connected: dict[str, Connection] = {}

    def receive(self) -> ReceivedState | None:
        """Returns the received state, or None if all senders have failed or the state is no longer needed."""
        while True:
            for offer in self._offers():
                if offer.sender not in self._tried:
                    thread = threading.Thread(target=self._run, args=(offer,), name="paceline-receiver", daemon=True)
                    self._tried[offer.sender] = thread
                    thread.start()
            with self._changed:
                self._changed.wait(_LOOK_S)
            if self._room is not None and self._room.chunks.is_complete:
                return self._finish(self._room)
            if self._is_needless() or not any(thread.is_alive() for thread in self._tried.values()):
                self._close()
                return None

    def _run(self, offer: TransferOffer) -> None:
        """Receives chunks from one sender until no chunk is left or the sender fails."""
        lower_thread_priority()
        try:
            connection = self._connect(offer)
            self._connected[offer.sender] = connection
            contents, _ = receive_head(connection)
            if isinstance(contents, SnapshotContents) and (room := self._room_for(contents)) is not None:
                self._get_chunks(offer.sender, connection, room)
                return
        except (OSError, BrokenTransferError, AuthenticationError, RuntimeError):
            pass  # the sender has failed, but other senders serve the missing chunks
        self._lost(offer.sender)

    def _connect(self, offer: TransferOffer) -> Connection:
        host, _, port = offer.address.rpartition(":")
        plain = dial((host, int(port)), _PATIENCE_S)
        key = derive_key(job_secret(), KEY)
        connection = connect_with_key(plain, key, key, PeerHello(CHANNEL, generation=offer.transfer), _PATIENCE_S)
        connection.settimeout(_PATIENCE_S)
        return connection

    def _room_for(self, contents: SnapshotContents) -> _ReceiveBuffers | None:
        """Returns the buffers, or None if this sender's snapshot differs from that of the first sender."""
        with self._changed:
            if self._room is None:
                self._room = _ReceiveBuffers(contents)
            same = self._room.contents.round == contents.round and self._room.contents.sizes == contents.sizes
            return self._room if same else None

    def _get_chunks(self, sender: str, connection: Connection, room: _ReceiveBuffers) -> None:
        scratch = memoryview(bytearray(CHUNK_BYTES))
        while True:
            with self._changed:
                number = room.chunks.next_for(sender)
            if number is None:
                return
            connection.sendall(REQUEST.pack(RequestKind.CHUNK, number, 0, 0))
            head, _ = receive_head(connection)
            if not isinstance(head, SnapshotChunk) or head.number != number or head.nbytes > len(scratch):
                raise BrokenTransferError(f"{head} instead of chunk {number}")
            data = scratch[: head.nbytes]
            receive_into(connection, data)
            if digest_of_chunk([data]) != head.digest:
                raise BrokenTransferError(f"chunk {number} arrived damaged")
            self._put(room, number, data)
            failpoint("join.chunk")

    def _put(self, room: _ReceiveBuffers, number: int, data: memoryview) -> None:
        with self._changed:
            if not room.chunks.arrived(number):
                return
            offset = 0
            for buffer, first, stop in room.layout.spans(number):
                room.memories[buffer][first:stop] = data[offset : offset + stop - first]
                offset += stop - first
            if room.chunks.is_complete:
                self._changed.notify_all()

    def _lost(self, sender: str) -> None:
        with self._changed:
            if self._room is not None:
                self._room.chunks.lost(sender)
            connection = self._connected.pop(sender, None)
        if connection is not None:
            connection.close()

    def _finish(self, room: _ReceiveBuffers) -> ReceivedState | None:
        for sender, thread in self._tried.items():  # a sender may still send a duplicate chunk
            thread.join(_DUPLICATE_S)
            if thread.is_alive():
                self._lost(sender)
        try:
            state = decode(room.contents.body, room.buffers)
        except MalformedPayload:
            self._close()
            return None
        return ReceivedState(room.contents, state, list(self._connected.values()))

    def _close(self) -> None:
        for connection in list(self._connected.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # stops the thread that receives from this connection
            connection.close()
        self._connected.clear()


_MOST_TRANSFERS = 3  # number of failed transfers after which the others wait while the worker receives the state


class ViewAdmission:
    """Requests to join the job, and waits for the admission."""

    def __init__(self, connection: LauncherConnection) -> None:
        self._connection = connection
        self._ready = WorkerReady("")
        self._failed = 0
        self._latest = 0  # the number of the last transfer

    def request(self, fingerprint: str, *, can_catch_up: bool) -> None:
        """Requests to join; see `WorkerReady`."""
        self._ready = WorkerReady(fingerprint, can_catch_up)
        self._connection.send(self._ready)

    def request_again(self) -> None:
        """Repeats the request after a view or a transfer has failed."""
        self._ready = WorkerReady(
            self._ready.fingerprint, self._failed < _MOST_TRANSFERS and self._ready.can_catch_up, self._latest
        )
        self._connection.send(self._ready)

    def has_failed(self, *, may_retry: bool) -> None:
        """Repeats the request after a failed transfer.

        If `may_retry` is False, or after too many failures, the others wait while the worker receives the state.
        """
        self._failed = self._failed + 1 if may_retry else _MOST_TRANSFERS
        self.request_again()

    def await_admission(self, after: int) -> View | ExitRequest | ReceivedState:
        """Waits for a view with a generation greater than `after`, an order to exit, or a successful transfer."""
        while True:
            message = self._connection.await_message(partial(self._messages_after, after))
            if not isinstance(message, TransferOffer):
                return message
            self._latest = message.transfer
            receiver = StateReceiver(self._offers_now, lambda: self._has_a_place(after))
            if (received := receiver.receive()) is not None:
                return received
            if not self._has_a_place(after):
                self.has_failed(may_retry=True)

    def _messages_after(self, after: int) -> list[View | ExitRequest | TransferOffer]:
        """Returns the view or the order to exit, or the offers of a transfer that is newer than the previous one."""
        if (answer := self._answer(after)) is not None:
            return [answer]
        return [offer for offer in self._connection.offers if offer.transfer > self._latest]

    def _answer(self, after: int) -> View | ExitRequest | None:
        return self._connection.dismissed or self._connection.latest_view(after)

    def _has_a_place(self, after: int) -> bool:
        """Returns True if a transfer is unnecessary because a view contains this worker or the worker must exit."""
        answer = self._answer(after)
        return isinstance(answer, ExitRequest) or (answer is not None and self._connection.name in answer.members)

    def _offers_now(self) -> list[TransferOffer]:
        return [offer for offer in self._connection.offers if offer.transfer == self._latest]
