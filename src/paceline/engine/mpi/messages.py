"""Messages over MPI, directly from and to the tensors' memory; each begins with its size and dtype."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.engine.adapters.diagnosis import FailureDiagnosis
from paceline.engine.adapters.recording import GroupRecorder, RecordedWork
from paceline.engine.adapters.serial_channel import CallTimeout, LibraryError
from paceline.engine.adapters.waited_message import WaitedMessage
from paceline.engine.channel import Outcome, Pieces
from paceline.engine.failures import Code, Failure
from paceline.engine.mpi.library import MOST_BYTES, library
from paceline.engine.mpi.requests import complete

_HEAD = struct.Struct("<qq")  # number of bytes, dtype code


class MpiMessages:
    """The messages between two ranks of a group; see `engine.channel.Messages`.

    Args:
        comm: a communicator for messages alone.
        lock: the lock that is held during every call of MPI.
        diagnosis: finds out why a message failed.
    """

    def __init__(self, comm: Any, lock: threading.Lock, diagnosis: FailureDiagnosis) -> None:
        self._comm = comm
        self._lock = lock
        self._diagnosis = diagnosis
        self._recorder = GroupRecorder(diagnosis.members, diagnosis.rank)
        self._most_tag: int = library().COMM_WORLD.Get_attr(library().TAG_UB)

    def record_messages_as(self, group: int, /) -> None:
        """Records the messages from now on as those of this group."""
        self._recorder.group = group

    def send(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> WaitedMessage:
        """Starts a send to a group rank."""
        memory = _Memory(dtype, tensor)
        memory.label()
        recorded = self._recorder.send(peer, tag, dtype, tensor)
        return self._start(self._comm.Isend, memory, peer, tag, timeout_ns, background, recorded, self._sent)

    def receive(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> WaitedMessage:
        """Starts a receive from a group rank, or with -1 from any rank."""
        memory = _Memory(dtype, tensor)
        recorded = self._recorder.receive(peer, tag, dtype, tensor)
        return self._start(self._comm.Irecv, memory, peer, tag, timeout_ns, background, recorded, self._received)

    def _start(
        self,
        post: Callable[..., Any],
        memory: _Memory,
        peer: int,
        tag: int,
        timeout_ns: int,
        background: bool,
        recorded: RecordedWork,
        end: Callable[[_Memory, Any, int], tuple[int, Outcome | None]],
    ) -> WaitedMessage:
        if tag > self._most_tag:
            raise ValueError(f"tag is {tag}; this MPI library has tags up to {self._most_tag}")
        mpi = library()
        with self._lock:
            request = post([mpi.BOTTOM, 1, memory.kind], mpi.ANY_SOURCE if peer < 0 else peer, tag)

        def finish() -> tuple[int, Outcome | None]:
            started_ns = time.monotonic_ns()
            status = mpi.Status()
            try:
                complete(request, self._lock, started_ns + timeout_ns, status)
            except (CallTimeout, LibraryError) as error:
                self._give_up(request)
                said = "" if isinstance(error, CallTimeout) else str(error)
                return peer, self._diagnosis.about_message(peer, said, time.monotonic_ns() - started_ns)
            return end(memory, status, peer)

        return WaitedMessage(finish, recorded, background)

    def _sent(self, memory: _Memory, _: Any, peer: int) -> tuple[int, Outcome | None]:
        memory.close()
        return peer, None

    def _received(self, memory: _Memory, status: Any, _: int) -> tuple[int, Outcome | None]:
        memory.close()
        source: int = status.Get_source()
        return source, memory.misfit(source, self._comm.Get_rank())

    def _give_up(self, request: Any) -> None:
        with self._lock:
            if request:
                request.Cancel()
                request.Free()


class _Memory:
    """A tensor and the label before it, as one MPI datatype whose addresses are absolute."""

    def __init__(self, dtype: int, pieces: Pieces) -> None:
        mpi = library()
        self._expected = (sum(pieces[1::2]), dtype)
        self._label = bytearray(_HEAD.size)
        spans = [(mpi.Get_address(self._label), _HEAD.size)]
        for address, nbytes in zip(pieces[::2], pieces[1::2], strict=True):
            spans += [(address + at, min(MOST_BYTES, nbytes - at)) for at in range(0, nbytes, MOST_BYTES)]
        self.kind = mpi.BYTE.Create_hindexed([nbytes for _, nbytes in spans], [address for address, _ in spans])
        self.kind.Commit()

    def label(self) -> None:
        """Writes the tensor's size and dtype into the label, for a send."""
        _HEAD.pack_into(self._label, 0, *self._expected)

    def misfit(self, source: int, receiver: int) -> Outcome | None:
        """Returns why a received message does not fit the tensor, or None if it fits."""
        (nbytes, dtype), (expected, expected_dtype) = _HEAD.unpack(self._label), self._expected
        if (nbytes, dtype) == self._expected:
            return None
        return Failure(
            Code.MISMATCH,
            split_from=source,
            split_to=receiver,
            split_sent=nbytes,
            split_expected=expected,
            calls=[(0, 0, dtype, 0, 0, 0), (0, 0, expected_dtype, 0, 0, 0)],
        )

    def close(self) -> None:
        """Frees the MPI datatype."""
        self.kind.Free()
