"""Services that a launcher provides for its workers: stores, and the multiplexer for jobs with a single port.

The launcher serves the stores of each generation, so that the stores outlive rank 0. Workers connect to Paceline's
store at PACELINE_STORE with the job's secret; on a single machine, the store uses a Unix socket. torch.distributed uses
a separate store at MASTER_ADDR and MASTER_PORT, because its clients expect a store there if
TORCHELASTIC_USE_AGENT_STORE is set. The protocol of torch's store has no authentication. Torch's store therefore has
its own keys, and on a single machine it listens only on loopback. The store starts listening only when a worker
requests it, so that a job with only Paceline's groups does not open this port.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from paceline import _core
from paceline.comm.one_port.dialer import GATE_VARIABLE, PORT_VARIABLE
from paceline.comm.one_port.port_multiplexer import PortMultiplexer, random_name
from paceline.comm.rendezvous.environment import STORE, TORCH_STORE, TORCH_STORE_REQUESTS, USES_TORCH_STORE
from paceline.comm.security.authenticated_listener import ListeningEndpoint
from paceline.comm.store.tcp_store import BACKLOG, PortInUseError, StoreServer, bind_to_port, listen
from paceline.operate.launch.job import CommandKind, Job
from paceline.operate.launch.multinode.protocol import Start

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # 0 disables the plug-in that requests torch's store


class WorkerStores:
    """The stores served by this machine's launcher. Workers use only those on the machine with rank 0."""

    def __init__(self, job: Job, address: str, secret: bytes | None, print_line: Callable[[str], None]) -> None:
        self._job = job
        self._address = address
        self._secret = secret
        self._print_line = print_line
        self._torch_socket: socket.socket | None = None  # bound, but not listening until a worker requests the store
        self._requests = -1  # named pipe for requests to open torch's store
        self._listener: ListeningEndpoint | None = None
        self._torch_server: _core.StoreServer | None = None
        self._server: StoreServer | None = None

    def reserve(self) -> tuple[int, int]:
        """Binds and returns the ports for torch's store and for Paceline's store in the next generation.

        The first port is 0 in a job with a single port, because torch.distributed then uses Paceline's store through
        the plug-in. The second port is 0 on a single machine.
        """
        job = self._job
        if job.one_port is None and self._torch_socket is None:
            try:
                self._torch_socket = bind_to_port(self._address, job.port or 0, self._secret)
            except PortInUseError as error:
                if job.port is None:
                    raise
                self._print_line(
                    f"no store can be served at MASTER_PORT, which env:// of torch.distributed needs: {error}"
                )
        if job.rendezvous.address is not None and self._listener is None:
            self._listener = listen(self._address, 0, self._secret)
        torch_port = job.port if self._torch_socket is None else self._torch_socket.getsockname()[1]
        store_port = 0 if self._listener is None else int(self._listener.getsockname()[1])
        return torch_port or port_beside(job.one_port) or 0, store_port

    def serve(self, start: Start, secret: bytes | None, directory: str) -> dict[str, str]:
        """Serves a generation's stores if rank 0 runs here; returns variables that workers use to find the stores.

        `secret` is that of the generation's workers, and `directory` the job's private directory on this machine.
        """
        variables = {}
        if self._job.rendezvous.address is None:
            path = str(Path(directory, f"store-{start.generation}"))
            self._server = StoreServer.on_unix_path(path, secret)
            variables[STORE] = f"unix:{path}"
        else:
            variables[STORE] = f"tcp:{_place(start.master_addr, start.store_port)}"
        if self._job.one_port is None and (self._torch_socket is not None or start.group_rank != 0):
            variables |= {TORCH_STORE: _place(start.master_addr, start.master_port), USES_TORCH_STORE: "True"}
        if start.group_rank != 0:
            self._close_listeners()
            return variables
        if self._listener is not None:
            self._server, self._listener = StoreServer(self._listener, secret), None
        if self._torch_socket is not None:
            path = str(Path(directory, f"torch-store-{start.generation}"))
            os.mkfifo(path, 0o600)
            self._requests = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            variables[TORCH_STORE_REQUESTS] = path
            if self._job.command.kind is CommandKind.PROGRAM or os.environ.get(_AUTOLOAD) == "0":
                self.open_torch_store()  # workers might not load the plug-in that requests torch's store
        return variables

    def requests_fileno(self) -> int:
        """Returns a descriptor that is readable once a worker requests torch's store; -1 without torch's store."""
        return self._requests if self._torch_socket is not None else -1

    def open_torch_store(self) -> None:
        """Starts torch's store, unless it is already running or another process is listening on its port."""
        if self._torch_socket is None:
            return
        try:
            self._torch_socket.listen(BACKLOG)
            self._torch_server = _core.StoreServer(os.dup(self._torch_socket.fileno()))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # if the port is in use, the program serves its own store there
                self._print_line(
                    f"no store can be served at MASTER_PORT, which env:// of torch.distributed needs: {error}"
                )
        self._torch_socket.close()
        self._torch_socket = None

    def end_generation(self) -> None:
        """Closes the stores of a generation; idempotent."""
        for server in (self._server, self._torch_server):
            if server is not None:
                server.close()
        self._server = self._torch_server = None
        if self._requests >= 0:
            os.close(self._requests)
            self._requests = -1

    def close(self) -> None:
        """Closes all stores and listeners; idempotent."""
        self.end_generation()
        self._close_listeners()

    def _close_listeners(self) -> None:
        for listener in (self._listener, self._torch_socket):
            if listener is not None:
                with contextlib.suppress(OSError):
                    listener.close()
        self._listener = self._torch_socket = None


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def open_multiplexer(job: Job) -> Iterator[None]:
    """Opens the port for all connections to this launcher and its workers, if the job has a single port."""
    before = multiplexer_variables()  # the variables may belong to an outer job
    _set({})
    try:
        if job.one_port is None:
            yield
            return
        name = random_name()
        with contextlib.closing(PortMultiplexer(job.one_port, name)):
            _set({PORT_VARIABLE: str(job.one_port), GATE_VARIABLE: name})
            yield
    finally:
        _set(before)


def multiplexer_variables() -> dict[str, str]:
    """Returns the variables that workers use to find their launcher's multiplexer; empty if there is none."""
    return {name: os.environ[name] for name in (PORT_VARIABLE, GATE_VARIABLE) if name in os.environ}


def _set(variables: Mapping[str, str]) -> None:
    for name in (PORT_VARIABLE, GATE_VARIABLE):
        os.environ.pop(name, None)
    os.environ.update(variables)


def require_port(address: str, secret: bytes | None) -> None:
    """Checks that the multiplexer can listen on this machine's address, before any worker requires it.

    Raises:
        PortInUseError: another program uses the port.
        StoreConnectionError: the address does not belong to this machine.
    """
    listen(address, 0, secret).close()


def port_beside(one_port: int | None) -> int | None:
    """Returns the workers' MASTER_PORT in a job with a single port, or None for other jobs.

    MASTER_PORT is the number after `one_port`. If the plug-in does not replace torch.distributed's store, that store
    listens on this port, so the user must be able to predict the number.
    """
    if one_port is None:
        return None
    return one_port + 1 if one_port < 65535 else one_port - 1
