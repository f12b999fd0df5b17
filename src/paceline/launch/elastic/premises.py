"""What the workers of an elastic job on this machine need besides each other: a store, a secret, a process to fork."""

from __future__ import annotations

import hmac
import os
import selectors
from collections.abc import Callable
from pathlib import Path

from paceline.launch.cleanup import Cleanup
from paceline.launch.elastic.forking import Forker
from paceline.launch.environment import free_port
from paceline.launch.job import Job, Kind
from paceline.launch.kept_memory import Keeper
from paceline.launch.keyboard import Keyboard
from paceline.launch.logs import Logs
from paceline.launch.machine import Machine
from paceline.launch.nodes.meeting import NodeConnection
from paceline.launch.nodes.messages import Begin, Start
from paceline.launch.start_workers import Surroundings
from paceline.launch.worker import allow_descriptors
from paceline.security.inherited import VARIABLE as SECRET_FD
from paceline.security.inherited import SecretFile
from paceline.store.server import StoreServer
from paceline.store.tcp import listen


class Premises:
    """The workers' store, if it is served here, and what leads to it; all workers of the job hold one secret.

    With several machines the launcher that serves the meeting serves the store too: no worker may, since any may die.

    Attributes: `secret`, which all workers of the job hold, and `port` of the store, if it is served to other machines.
    """

    def __init__(self, job: Job, connection: NodeConnection, secret: bytes | None, cleanup: Cleanup) -> None:
        self._job = job
        self._cleanup = cleanup
        self.secret = None if secret is None else hmac.digest(secret, b"workers of an elastic job", "sha256")
        self._file: SecretFile | None = None
        self._store: StoreServer | None = None
        self._forker: Forker | None = None
        self.port = 0
        if connection.server is not None:
            self._store = StoreServer(listen(connection.address, 0, self.secret), self.secret)
            self.port = self._store.port

    def open(
        self,
        begin: Begin,
        environment: dict[str, str],
        machine: Machine,
        logs: Logs,
        keyboard: Keyboard,
        keeper: Keeper,
    ) -> Surroundings:
        """Returns what the workers have in common; `environment` is what any job's workers share.

        Raises:
            OSError: the store cannot be served.
        """
        served = begin.store
        if not served:
            path = Path(self._cleanup.directory, "store-1")
            self._store = StoreServer.on_unix_path(str(path), self.secret)
            served = f"unix:{path}"
        environment["PACELINE_STORE"] = served
        # Torch then asks for huge pages: a worker that forks to give others its state does so five times as fast.
        environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        if self.secret is not None:
            self._file = SecretFile.create(self.secret)
            environment[SECRET_FD] = str(self._file)
        return Surroundings(
            environment,
            pass_fds=[self._file.fd] if self._file is not None else [],
            directory=self._cleanup.directory,
            cores=machine.cores,
            gpus=machine.gpus,
            logs=logs,
            keyboard=keyboard,
            keeper=keeper,
        )

    def start_of(self, begin: Begin) -> Start:
        """Returns the ranks of the slots: their numbers."""
        host, port = "127.0.0.1", self._job.port or free_port()
        if begin.store:
            address, _, number = begin.store.removeprefix("tcp:").rpartition(":")
            host, port = address.strip("[]"), int(number)
        most = self._job.max_restarts
        first, slots = begin.first_slot, begin.slots
        return Start(1, 0, most, begin.run_id, begin.machine, begin.machine + 1, first, slots, first, slots, host, port)

    def forker(self, around: Surroundings, selector: selectors.BaseSelector, say: Callable[[str], None]) -> Forker:
        """Returns what starts the workers: forks, unless the user or the kind of program wants new interpreters."""
        descriptors = allow_descriptors(self._job.workers)
        forks = self._job.forks and self._job.command.kind is not Kind.PROGRAM
        preload = self._job.elastic.preload if self._job.elastic is not None else ()
        self._forker = Forker(around.environment, around.pass_fds, descriptors, selector, say, forks, preload)
        return self._forker

    def close(self) -> None:
        """Ends all of it; idempotent."""
        if self._forker is not None:
            self._forker.close()
            self._forker = None
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._file is not None:
            os.close(self._file.fd)
            self._file = None
