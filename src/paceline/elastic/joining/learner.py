"""A learner gets the state: from all donors at once, and checked chunk by chunk."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.elastic.failpoints import reach
from paceline.elastic.joining.chunks import Chunks, Layout
from paceline.elastic.joining.donors import KEY
from paceline.elastic.joining.priority import be_modest
from paceline.elastic.joining.wire import (
    CHANNEL,
    CHUNK_BYTES,
    REQUEST,
    Ask,
    BrokenLessonError,
    Chunk,
    Contents,
    digest_of_chunk,
    receive_head,
    receive_into,
)
from paceline.elastic.messages import Learn
from paceline.errors import AuthenticationError
from paceline.group.exchange import as_memory, room_for
from paceline.group.objects.codec import MalformedPayload
from paceline.group.objects.serialization import decode
from paceline.one_port.dialing import dial
from paceline.security.encryption import Connection, begin
from paceline.security.handshake import Hello, prove
from paceline.security.secret import derive_key, job_secret

_PATIENCE_S = 30.0  # how long a donor may take to go on with what it has begun to send
_DUPLICATE_S = 1.0  # how long a donor may take to send what another has sent as well
_LOOK_S = 0.02


class Taught:
    """What the donors have given: the state, what goes with it, and connections for the results since."""

    def __init__(self, contents: Contents, state: Any, donors: list[Connection]) -> None:
        self.contents = contents
        self.donors = donors
        self._state = state

    def take_state(self) -> Any:
        """Returns the state, which is large, and forgets it."""
        state, self._state = self._state, None
        return state


@dataclass
class _Room:
    """The memory that the state is received in, once a donor has said how much it takes."""

    contents: Contents
    chunks: Chunks
    layout: Layout
    buffers: list[torch.Tensor]
    memories: list[memoryview]
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, contents: Contents) -> _Room:
        """Returns memory for what a donor has announced."""
        buffers = room_for(contents.sizes)
        layout = Layout(contents.sizes, CHUNK_BYTES)
        return cls(contents, Chunks(layout.count), layout, buffers, [as_memory(each) for each in buffers])


class Learner:
    """Gets the state of one lesson.

    Args:
        offers: returns the donors that serve the lesson, of which more may come.
        is_needless: is called now and then; when it returns True, the state is not needed any more.
    """

    def __init__(self, offers: Callable[[], Sequence[Learn]], is_needless: Callable[[], bool]) -> None:
        self._offers, self._is_needless = offers, is_needless
        self._changed = threading.Condition()
        self._room: _Room | None = None
        self._tried: dict[str, threading.Thread] = {}
        self._connected: dict[str, Connection] = {}

    def learn(self) -> Taught | None:
        """Returns what the donors give; None if all have failed, or if it is not needed any more."""
        while True:
            for offer in self._offers():
                if offer.donor not in self._tried:
                    self._begin(offer)
            with self._changed:
                self._changed.wait(_LOOK_S)
            if self._room is not None and self._room.chunks.is_complete:
                return self._finish(self._room)
            if self._is_needless() or not any(each.is_alive() for each in self._tried.values()):
                self._close()
                return None

    def _begin(self, offer: Learn) -> None:
        thread = threading.Thread(target=self._run, args=(offer,), name="paceline-learner", daemon=True)
        self._tried[offer.donor] = thread
        thread.start()

    def _run(self, offer: Learn) -> None:
        """Gets chunks from one donor as long as there are any and it goes well."""
        be_modest()
        try:
            connection = self._connect(offer)
            self._connected[offer.donor] = connection
            contents, _ = receive_head(connection)
            if isinstance(contents, Contents) and (room := self._room_for(contents)) is not None:
                self._get_chunks(offer.donor, connection, room)
                return
        except (OSError, BrokenLessonError, AuthenticationError, RuntimeError):
            pass  # the others give what this one has not
        self._lost(offer.donor)

    def _connect(self, offer: Learn) -> Connection:
        host, _, port = offer.address.rpartition(":")
        plain = dial((host, int(port)), _PATIENCE_S)
        key = derive_key(job_secret(), KEY)
        connection = begin(plain, key, _PATIENCE_S)
        prove(connection, key, Hello(CHANNEL, generation=offer.lesson))
        connection.settimeout(_PATIENCE_S)
        return connection

    def _room_for(self, contents: Contents) -> _Room | None:
        """Returns the room; None if this donor's snapshot is of another round than the first one's."""
        with self._changed:
            if self._room is None:
                self._room = _Room.of(contents)
            same = self._room.contents.round == contents.round and self._room.contents.sizes == contents.sizes
            return self._room if same else None

    def _get_chunks(self, donor: str, connection: Connection, room: _Room) -> None:
        scratch = memoryview(bytearray(CHUNK_BYTES))
        while True:
            with self._changed:
                number = room.chunks.next_for(donor)
            if number is None:
                return
            connection.sendall(REQUEST.pack(Ask.CHUNK, number, 0, 0))
            head, _ = receive_head(connection)
            if not isinstance(head, Chunk) or head.number != number or head.nbytes > len(scratch):
                raise BrokenLessonError(f"{head} instead of chunk {number}")
            data = scratch[: head.nbytes]
            receive_into(connection, data)
            if digest_of_chunk([data]) != head.digest:
                raise BrokenLessonError(f"chunk {number} came damaged")
            self._put(room, number, data)
            reach("join.chunk")

    def _put(self, room: _Room, number: int, data: memoryview) -> None:
        with self._changed:
            if not room.chunks.arrived(number):
                return
            at = 0
            for buffer, first, stop in room.layout.spans(number):
                room.memories[buffer][first:stop] = data[at : at + stop - first]
                at += stop - first
            if room.chunks.is_complete:
                self._changed.notify_all()

    def _lost(self, donor: str) -> None:
        with self._changed:
            if self._room is not None:
                self._room.chunks.lost(donor)
            connection = self._connected.pop(donor, None)
        if connection is not None:
            connection.close()

    def _finish(self, room: _Room) -> Taught | None:
        for donor, thread in self._tried.items():  # a donor may still send what another has sent as well
            thread.join(_DUPLICATE_S)
            if thread.is_alive():
                self._lost(donor)
        try:
            state = decode(room.contents.body, room.buffers)
        except MalformedPayload:
            self._close()
            return None
        return Taught(room.contents, state, list(self._connected.values()))

    def _close(self) -> None:
        for connection in list(self._connected.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # its thread ends
            connection.close()
        self._connected.clear()
