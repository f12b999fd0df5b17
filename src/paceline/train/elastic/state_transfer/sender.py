"""The sending side of state transfers. A member takes snapshots by forking, and logs later results."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.comm.engine.network_settings import own_address
from paceline.comm.group.buffers import as_memory
from paceline.comm.group.collectives.object_codec import encode
from paceline.comm.security.authenticated_listener import ListeningEndpoint
from paceline.comm.security.encryption import identity_of
from paceline.comm.security.secret import chosen_level, derive_key, job_secret
from paceline.comm.store.tcp_store import listen
from paceline.errors import PacelineError
from paceline.train.elastic.agreement import BatchAssignment
from paceline.train.elastic.failpoints import failpoint
from paceline.train.elastic.launcher_connection import LauncherConnection
from paceline.train.elastic.protocol import StateTransfer, TransferReady, View
from paceline.train.elastic.state_transfer.optimizer_steps import OptimizerStepHooks
from paceline.train.elastic.state_transfer.snapshot_server import (
    ServedSnapshot,
    TransferProgress,
    append,
    new_log,
    serve_in_child,
)
from paceline.train.elastic.state_transfer.transfer_protocol import (
    LogItem,
    OptimizerStep,
    RoundResult,
    SnapshotContents,
    ViewEntered,
    kinds_of,
)
from paceline.train.elastic.training_state import TrainingState
from paceline.train.module_tensors import memory_of

_GROWS = 2.0  # the total wait is reported again after it has grown by this factor and by `_LEAST_S`
_LEAST_S = 1.0  # minimum growth of the total wait between two reports, in seconds


@dataclass
class ReceiverDelays:
    """The accumulated waits for one slow receiver, and the messages that report them to the user."""

    receiver: str
    count: int = 0
    total_s: float = 0.0
    _reported_s: float = -1.0  # the total at the last report

    def waited(self, for_s: float) -> str | None:
        """Adds a wait; returns a report for the user if this is the first wait or the total has grown enough."""
        self.count += 1
        self.total_s += for_s
        has_grown = self.total_s >= max(_GROWS * self._reported_s, self._reported_s + _LEAST_S)
        return self._report() if self._reported_s < 0 or has_grown else None

    def over(self) -> str | None:
        """Returns a final report for the user, or None if the total was already reported."""
        return self._report() if self.total_s > max(self._reported_s, 0.0) else None

    def _report(self) -> str:
        self._reported_s = self.total_s
        times = "once" if self.count == 1 else f"{self.count} times"
        who = f"worker {self.receiver}, which receives the state more slowly"
        return f"the others waited for {who}: {times}, {self.total_s:.1f} s in all"


_LEAST_LOG_BYTES = 64 << 20
_STUCK_S = 10.0  # time without any progress after which a receiver is dropped
_LOOK_S = 0.005


class Snapshot:
    """A copy-on-write snapshot of the training state, taken by forking.

    Closing the snapshot kills the child and frees its memory. The child shares the memory of the state until this
    process changes it. The snapshot therefore needs additional memory for the part of the state that changes during the
    snapshot's lifetime, at most as much as the whole state. The log may need the same amount. When the log is full,
    training waits for the receiver.

    Args:
        number: The transfer number.
        registry: The state of this worker.
        round_number, committed, dealt: The next round, and so on; see `SnapshotContents`.
        listener: The listener to which the receiver connects; ownership passes to this object.
        key: The key that the receiver must hold.

    Raises:
        OSError: Processes, descriptors or memory are exhausted.
        TypeError: The state cannot be sent.
    """

    def __init__(
        self,
        number: int,
        registry: TrainingState,
        round_number: int,
        committed: int,
        dealt: BatchAssignment,
        listener: ListeningEndpoint,
        key: bytes,
    ) -> None:
        self._size = 0
        self._child = 0
        with contextlib.ExitStack() as undo:
            undo.callback(listener.close)
            encoded = encode(registry.capture(), "the state")
            memories = [as_memory(buffer) for buffer in encoded.buffers]
            sizes = tuple(map(len, memories))
            contents = SnapshotContents(round_number, committed, dealt, bytes(encoded.body), sizes)
            self._most = max(_LEAST_LOG_BYTES, sum(sizes))
            self._log = new_log()
            undo.callback(os.close, self._log)
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self._line.close)
            self._progress = TransferProgress()
            served = ServedSnapshot(number, key, contents, memories, listener, self._log, theirs, self._progress)
            with theirs:
                self._fork(served)
            self._line.setblocking(False)
            undo.pop_all()
        listener.close()

    def _fork(self, served: ServedSnapshot) -> None:
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns about forking a process that has threads; see `snapshot_server.py`
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            serve_in_child(served, parent)
        self._child = child

    @property
    def is_over(self) -> bool:
        """Whether the child has exited."""
        if self._child:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self._child, os.WNOHANG) == (0, 0):
                    return False
            self._child = 0
        return True

    def log(self, item: LogItem, tensors: Sequence[memoryview] = ()) -> None:
        """Appends an item to the receiver's log; closes the snapshot if memory is exhausted."""
        try:
            self._size = append(self._log, item, tensors)
            self._line.send(b"+")
        except BlockingIOError:
            pass  # earlier notifications are still pending
        except OSError:
            self.close()

    def make_room(self) -> bool:
        """If the log has grown too long, waits until the receiver has read all of it; returns whether it waited.

        A receiver that has not connected, or reads nothing for some time, is dropped.
        """
        if self._log < 0 or self._size - self._progress.done <= self._most:
            return False
        sent, since_s = self._progress.sent, time.monotonic()
        while self._progress.done < self._size and not self.is_over:
            if self._progress.sent != sent:
                sent, since_s = self._progress.sent, time.monotonic()
            elif sent == 0 or time.monotonic() - since_s > _STUCK_S:
                self.close()
                break
            time.sleep(_LOOK_S)
        return True

    def close(self) -> None:
        """Kills the child and frees the log. Idempotent."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._child, 0)
            self._child = 0
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
            self._line.close()


KEY = "transfer of an elastic job"


class StateSender:
    """The transfers that this member serves. Usually there are none.

    Args:
        connection: The worker's connection to its launcher.
        registry: The state of this worker.
        steps: The hooks for the optimizer steps of a DDP loop, or None for other loops. Receivers get these steps
            instead of the results of rounds.
    """

    def __init__(
        self, connection: LauncherConnection, registry: TrainingState, steps: OptimizerStepHooks | None = None
    ) -> None:
        self._connection = connection
        self._registry = registry
        self._steps = steps
        self._given: dict[int, Snapshot] = {}
        self._delays: dict[int, ReceiverDelays] = {}

    @property
    def is_sender(self) -> bool:
        """Whether this member serves any transfer."""
        return bool(self._given)

    def begin_batch(self, agreed: int, round_number: int, committed: int, dealt: BatchAssignment) -> None:
        """Waits for slow receivers, and starts the transfers up to `agreed`, which all members have received.

        The next round is `round_number`, and `committed` is the digest of the previous round's result.
        """
        for number, snapshot in list(self._given.items()):
            began_s = time.monotonic()
            if snapshot.make_room():
                _print_line(self._delays[number].waited(time.monotonic() - began_s))
            if snapshot.is_over:
                self._forget(number)
        for transfer in self._connection.transfers_until(agreed):
            self._begin(transfer, round_number, committed, dealt)
        self._watch_steps(round_number, committed)

    def committed(
        self,
        round_number: int,
        result: Sequence[torch.Tensor],
        digest: int,
        state: int,
        before: int,
        dealt: BatchAssignment,
    ) -> None:
        """Logs the result of a round for the receivers."""
        if not self._given:
            return
        if self._steps is not None:
            self._steps.at = round_number + 1, digest
            result = []
        memories = [memory_of(tensor) for tensor in result]
        nbytes = sum(map(len, memories))
        self._log(RoundResult(round_number, nbytes, kinds_of(result), digest, state, dealt, before), memories)
        failpoint("join.logged")

    def entering(self, round_number: int, view: View) -> None:
        """Logs that the members enter a view."""
        if self._given:
            self._log(ViewEntered(round_number, view.generation, view.members))

    def close(self) -> None:
        """Closes all transfers. Idempotent."""
        for number in list(self._given):
            self._forget(number)

    def _watch_steps(self, round_number: int, committed: int) -> None:
        """Starts or stops logging optimizer steps, depending on whether there are receivers."""
        if self._steps is None:
            return
        self._steps.at = round_number, committed
        if self._given and self._steps.on_step is None:
            self._steps.on_step = self._stepping
        elif not self._given and self._steps.on_step is not None:
            self._steps.on_step = None
            self._steps.forget()

    def _stepping(self, item: OptimizerStep, memories: Sequence[memoryview]) -> None:
        self._log(item, memories)
        failpoint("join.logged")

    def _log(self, item: LogItem, memories: Sequence[memoryview] = ()) -> None:
        for snapshot in self._given.values():
            snapshot.log(item, memories)

    def _begin(self, transfer: StateTransfer, round_number: int, committed: int, dealt: BatchAssignment) -> None:
        failpoint("join.snapshot")
        address = ""
        try:
            key = derive_key(job_secret(), KEY)
            if chosen_level() == "encrypt":
                # The child of a multithreaded process must not load OpenSSL, so it is loaded before the fork.
                identity_of(key)
            listener = listen(_own_host(), 0, job_secret())
            host, port = listener.getsockname()[:2]
            self._given[transfer.number] = Snapshot(
                transfer.number, self._registry, round_number, committed, dealt, listener, key
            )
            self._delays[transfer.number] = ReceiverDelays(transfer.receiver)
            if self._steps is not None and len(self._given) == 1:  # earlier receivers may have different gradients
                self._steps.at = round_number, committed
                self._steps.note(self._registry.parameters)
            address = f"{host}:{port}"
        except (OSError, TypeError, ValueError, PacelineError) as error:
            sys.stderr.write(f"paceline: {self._connection} cannot serve its state to {transfer.receiver}: {error}\n")
        failpoint("join.serving")
        self._connection.send(TransferReady(transfer.number, round_number, address))

    def _forget(self, number: int) -> None:
        self._given.pop(number).close()
        _print_line(self._delays.pop(number).over())


def _print_line(text: str | None) -> None:
    if text is not None:
        sys.stderr.write(f"paceline: {text}\n")


def _own_host() -> str:
    """Returns the address at which other workers reach this one."""
    kind, _, place = os.environ.get("PACELINE_STORE", "").partition(":")
    if kind != "tcp":
        return "127.0.0.1"
    host = place.rpartition(":")[0].strip("[]")
    return host if host.startswith("127.") else own_address(host)
