"""A worker's connection to its launcher: a thread receives messages, and the training thread waits for them."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from paceline.comm.rendezvous.environment import check_not_importing
from paceline.errors import PacelineError
from paceline.train.elastic import protocol
from paceline.train.elastic.protocol import ExitRequest, FromWorker, StateTransfer, TransferOffer, View, WaitNotice

FD_VARIABLE = "PACELINE_ELASTIC_FD"
NAME_VARIABLE = "PACELINE_WORKER"
_REPORT_AFTER_S = 1.0  # minimum duration of a wait that is reported
_REMEMBERED = 4  # number of views, and number of offers, that are kept

T = TypeVar("T")


class LauncherLostError(PacelineError):
    """Raised if the launcher of an elastic worker has exited."""


class LauncherConnection:
    """The datagram socket of the worker `name`, and the thread that receives from it."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.name = name
        self._socket = connection
        self._changed = threading.Condition()
        self.latest_received = 0  # the highest view or transfer number received; 0 if none
        self._views: dict[int, View] = {}
        self._transfers: dict[int, StateTransfer] = {}
        self._latest_transfer = 0
        self._offers: list[TransferOffer] = []
        self.dismissed: ExitRequest | None = None  # the order to exit
        self._reason = ""
        self._is_lost = False
        self._on_view: Callable[[View], None] | None = None
        threading.Thread(target=self._listen, name="paceline-elastic", daemon=True).start()

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> LauncherConnection | None:
        """Returns the connection described by the environment, or None if there is no elastic launcher.

        Raises RuntimeError if this process is not the worker, but a process that the worker started.
        """
        fd = environment.get(FD_VARIABLE)
        if fd is None:
            return None
        name = environment[NAME_VARIABLE]
        check_not_importing(f"worker {name}")
        try:
            return cls(socket.socket(fileno=int(fd)), name)
        except OSError as error:
            raise RuntimeError(
                f"process {os.getpid()} does not have the connection of worker {name} to the launcher ({error}); only "
                "the worker itself, and not a process that it starts, can train with the others"
            ) from error

    def __str__(self) -> str:
        return f"worker {self.name} (pid {os.getpid()})"

    @property
    def offers(self) -> list[TransferOffer]:
        """The offers received for this worker's latest transfer."""
        with self._changed:
            latest = max((offer.transfer for offer in self._offers), default=0)
            return [offer for offer in self._offers if offer.transfer == latest]

    def latest_view(self, after: int) -> View | None:
        """Returns the latest received view with a generation greater than `after`, or None."""
        with self._changed:
            return self._views.get(max((number for number in self._views if number > after), default=0))

    def view_until(self, number: int) -> View | None:
        """Returns the latest received view with a generation of at most `number`, or None."""
        with self._changed:
            return self._views.get(max((known for known in self._views if known <= number), default=0))

    def transfers_until(self, number: int) -> list[StateTransfer]:
        """Removes and returns the transfers up to `number` that list this worker as a sender."""
        with self._changed:
            due = [transfer for transfer in self._transfers.values() if transfer.number <= number]
            for transfer in due:
                del self._transfers[transfer.number]
            return due

    def set_view_handler(self, on_view: Callable[[View], None] | None) -> None:
        """Calls `on_view` with each view received so far. The receiving thread calls it with each later view.

        After this method returns, the previous function is no longer called.
        """
        with self._changed:
            self._on_view = on_view
            if on_view is not None:
                for view in self._views.values():
                    on_view(view)

    def send(self, message: FromWorker) -> None:
        """Sends a message to the launcher. If the launcher has exited, the next wait raises an error."""
        with contextlib.suppress(OSError):
            self._socket.send(protocol.encode_message(message))

    def await_view(self, after: int, accepts: Callable[[View], bool]) -> View | ExitRequest:
        """Waits for a view later than `after` for which `accepts` returns True, or for the order to exit.

        During a long wait, each reason for waiting that the launcher sends is printed once. The launcher enforces the
        deadlines. Raises LauncherLostError if the launcher has exited.
        """

        def found() -> list[View | ExitRequest]:
            if self.dismissed is not None:
                return [self.dismissed]
            later = [number for number, view in self._views.items() if number > after and accepts(view)]
            return [self._views[max(later)]] if later else []

        return self.await_message(found)

    def await_message(self, found: Callable[[], Sequence[T]]) -> T:
        """Waits until `found` returns a non-empty sequence, and returns its first item.

        `found` is called at the beginning, after each message and at regular intervals. Raises LauncherLostError if the
        launcher has exited.
        """
        printed, began_s = "", time.monotonic()
        with self._changed:
            while True:
                if messages := found():
                    return messages[0]
                if self._is_lost:
                    raise LauncherLostError(f"{self}: its launcher has ended")
                waited_s = time.monotonic() - began_s
                if self._reason != printed and waited_s >= _REPORT_AFTER_S:
                    printed = self._reason
                    sys.stderr.write(f"paceline: worker {self.name} waits: {printed}\n")
                self._changed.wait(_REPORT_AFTER_S)

    def _listen(self) -> None:
        while True:
            try:
                datagram = self._socket.recv(protocol.LARGEST_DATAGRAM)
            except OSError:
                datagram = b""
            with self._changed:
                if not datagram:
                    self._is_lost = True
                    self._changed.notify_all()
                    return
                self._take(protocol.decode_to_worker(datagram))
                self._changed.notify_all()

    def _take(self, message: protocol.ToWorker) -> None:
        match message:
            case View():
                self._views[message.generation] = message
                for old in sorted(self._views)[:-_REMEMBERED]:
                    del self._views[old]
                if self._on_view is not None:
                    self._on_view(message)
                # set last, after the handler has begun to form the view's group
                self.latest_received = max(self.latest_received, message.generation)
            case StateTransfer() if message.number > self._latest_transfer:
                self._latest_transfer = message.number
                self.latest_received = max(self.latest_received, message.number)
                if self.name in message.senders:
                    self._transfers[message.number] = message
            case TransferOffer():
                self._offers = [*self._offers[1 - _REMEMBERED :], message]
            case WaitNotice(reason):
                self._reason = reason
            case ExitRequest():
                self.dismissed = message


def same_bits_as(facts: Mapping[str, object]) -> str:
    """Returns the fingerprint of a worker, given the facts on which its results depend, by the names used in messages.

    Workers with equal fingerprints compute bitwise equal results.
    """
    return msgspec.json.encode({name: str(fact) for name, fact in facts.items()}).decode()
