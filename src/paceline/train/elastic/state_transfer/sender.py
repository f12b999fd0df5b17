"""What a member does for receivers: takes snapshots when all have heard of a transfer, and logs what is committed.

How long a sender has waited for a receiver that is slower than the training, and when the user is told.

A sender's snapshot for one receiver: a fork of this process, and the log that it reads.
"""

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
from paceline.comm.group.collectives.object_codec import encode
from paceline.comm.group.variable_size import as_memory
from paceline.comm.security.authenticated_listener import ListeningEndpoint
from paceline.comm.security.encryption import identity_of
from paceline.comm.security.levels import chosen_level
from paceline.comm.security.secret import derive_key, job_secret
from paceline.comm.store.tcp_store import listen
from paceline.errors import PacelineError
from paceline.train.elastic.failpoints import failpoint
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
)
from paceline.train.elastic.worker.agreement import BatchAssignment
from paceline.train.elastic.worker.launcher_connection import LauncherConnection
from paceline.train.elastic.worker.training_state import TrainingState
from paceline.train.module_tensors import memory_of

_GROWS = 2.0  # it is worth a line again when the total has grown by this factor...
_LEAST_S = 1.0  # ... and by this much


@dataclass
class ReceiverDelays:
    """The waits for one receiver."""

    receiver: str
    count: int = 0
    total_s: float = 0.0
    _said_s: float = -1.0  # the total that the user knows of

    def waited(self, for_s: float) -> str | None:
        """Notes a wait; returns what the user is told, which is something at first, and then seldom."""
        self.count += 1
        self.total_s += for_s
        if self._said_s >= 0 and self.total_s < max(_GROWS * self._said_s, self._said_s + _LEAST_S):
            return None
        return self._told()

    def over(self) -> str | None:
        """Returns what the user is told at the end, unless he knows it."""
        return self._told() if self.total_s > max(self._said_s, 0.0) else None

    def _told(self) -> str:
        self._said_s = self.total_s
        times = "once" if self.count == 1 else f"{self.count} times"
        who = f"worker {self.receiver}, which learns more slowly"
        return f"the others waited for {who}: {times}, {self.total_s:.1f} s in all"


_LEAST_LOG_BYTES = 64 << 20
_STUCK_S = 10.0  # after which a receiver that takes nothing is given up
_LOOK_S = 0.005


class Snapshot:
    """The state of this process as it is when this is made; closed, nothing of it is left.

    The child shares the state's memory until this process changes it, so the snapshot needs as much memory as is
    changed while it lasts, at most that of the state, and the log as much again: a receiver that is slower than the
    training holds it up when the log is full.

    Args:
        number: the transfer's.
        registry: the state.
        round_number, committed, dealt: as in `Contents`.
        listener: where the receiver connects; it is taken over.
        key: what the receiver must hold.

    Raises:
        OSError: there are no processes, descriptors or memory.
        TypeError: the state cannot be sent.
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
            memories = [as_memory(each) for each in encoded.buffers]
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
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads; `serving.py` says why it may
            child = os.fork()
        if child == 0:
            serve_in_child(served, parent)
        self._child = child

    @property
    def is_over(self) -> bool:
        """Whether the child has ended."""
        if self._child:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self._child, os.WNOHANG) == (0, 0):
                    return False
            self._child = 0
        return True

    def log(self, item: LogItem, tensors: Sequence[memoryview] = ()) -> None:
        """Appends to what the receiver gets; gives the receiver up if there is no memory."""
        try:
            self._size = append(self._log, item, tensors)
            self._line.send(b"+")
        except BlockingIOError:
            pass  # the child has not yet taken notice of what came before
        except OSError:
            self.close()

    def make_room(self) -> bool:
        """Waits until the receiver has got the whole log, if that has become too long; returns whether it waited.

        A receiver that does not come, or takes nothing, is given up.
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
        """Ends the child; idempotent."""
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
    """The transfers that this member gives; most of the time there are none.

    Args:
        connection: the worker's connection to its launcher.
        registry: the state.
        steps: of the usual loop, in which receivers get the steps of optimizers; otherwise they get results of rounds.
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
    def teaches(self) -> bool:
        """Whether there are any."""
        return bool(self._given)

    def begin_batch(self, agreed: int, round_number: int, committed: int, dealt: BatchAssignment) -> None:
        """Begins the transfers that all members have heard of; `agreed` is the largest such number."""
        for number, snapshot in list(self._given.items()):
            began_s = time.monotonic()
            if snapshot.make_room():
                _say(self._delays[number].waited(time.monotonic() - began_s))
        self._forget_those_over()
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
        """Logs a round for those who learn."""
        if not self._given:
            return
        if self._steps is not None:
            self._steps.at = round_number + 1, digest
            result = []
        memories = [memory_of(each) for each in result]
        kinds = tuple((str(each.dtype), tuple(each.shape)) for each in result)
        nbytes = sum(map(len, memories))
        self._log(RoundResult(round_number, nbytes, kinds, digest, state, dealt, before), memories)
        failpoint("join.logged")

    def entering(self, round_number: int, view: View) -> None:
        """Logs that the members enter a view."""
        if self._given:
            self._log(ViewEntered(round_number, view.generation, view.members))

    def close(self) -> None:
        """Ends all transfers; idempotent."""
        for number in list(self._given):
            self._forget(number)

    def _watch_steps(self, round_number: int, committed: int) -> None:
        """Has the steps of optimizers logged from here on, if anybody learns."""
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
                identity_of(key)  # made here, so that the fork of a process with threads need not load OpenSSL
            listener = listen(_own_host(), 0, job_secret())
            host, port = listener.getsockname()[:2]
            self._given[transfer.number] = Snapshot(
                transfer.number, self._registry, round_number, committed, dealt, listener, key
            )
            self._delays[transfer.number] = ReceiverDelays(transfer.receiver)
            if self._steps is not None and len(self._given) == 1:  # those who learn already may have other gradients
                self._steps.at = round_number, committed
                self._steps.note(self._registry.parameters)
            address = f"{host}:{port}"
        except (OSError, TypeError, ValueError, PacelineError) as error:
            sys.stderr.write(f"paceline: {self._connection} cannot serve its state to {transfer.receiver}: {error}\n")
        failpoint("join.serving")
        self._connection.send(TransferReady(transfer.number, round_number, address))

    def _forget_those_over(self) -> None:
        for number in [number for number, snapshot in self._given.items() if snapshot.is_over]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._given.pop(number).close()
        _say(self._delays.pop(number).over())


def _say(text: str | None) -> None:
    if text is not None:
        sys.stderr.write(f"paceline: {text}\n")


def _own_host() -> str:
    """Returns the address at which the other workers reach this one."""
    kind, _, place = os.environ.get("PACELINE_STORE", "").partition(":")
    if kind != "tcp":
        return "127.0.0.1"
    host = place.rpartition(":")[0].strip("[]")
    return host if host.startswith("127.") else own_address(host)
