"""Stores and the one-port multiplexer, which a launcher serves for its workers.

The launcher serves the stores of each generation, so that they outlive rank 0. Workers reach Paceline's store at
PACELINE_STORE with the job's secret; on one machine it is a Unix socket. torch.distributed has a separate store at
MASTER_ADDR and MASTER_PORT, where its clients expect one of a launcher that sets TORCHELASTIC_USE_AGENT_STORE. Its
protocol has no authentication. That store therefore holds separate keys, and on a single machine it listens on loopback
only. It starts to listen when a worker requests it, so a job that uses only Paceline's groups opens no such port.
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

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # 0: PyTorch does not load the plug-in, which requests torch's store


class WorkerStores:
    """The stores of this machine's launcher; only those of the machine with rank 0 are used.

    Args:
        job: The job, with the chosen ports.
        address: The address of this machine for the others.
        secret: The job's secret, or None.
        say: A function that prints a line for the user.
    """

    def __init__(self, job: Job, address: str, secret: bytes | None, say: Callable[[str], None]) -> None:
        self._job = job
        self._address = address
        self._secret = secret
        self._say = say
        self._torch_socket: socket.socket | None = None  # bound; it listens once a worker requests the store
        self._requests = -1  # the named pipe for these requests
        self._listener: ListeningEndpoint | None = None
        self._torch_server: _core.StoreServer | None = None
        self._server: StoreServer | None = None

    def reserve(self) -> tuple[int, int]:
        """Binds and returns the ports of torch's store and of Paceline's for the next generation.

        The first is 0 in a job with one port, where torch.distributed uses Paceline's store through the plug-in. The
        second is 0 on a single machine.
        """
        job = self._job
        if job.one_port is None and self._torch_socket is None:
            try:
                self._torch_socket = bind_to_port(self._address, job.port or 0, self._secret)
            except PortInUseError as error:
                if job.port is None:
                    raise
                self._say(f"MASTER_PORT cannot be served, which the env:// of torch.distributed needs: {error}")
        if job.rendezvous.address is not None and self._listener is None:
            self._listener = listen(self._address, 0, self._secret)
        torch_port = job.port if self._torch_socket is None else self._torch_socket.getsockname()[1]
        return torch_port or port_beside(job.one_port) or 0, 0 if self._listener is None else _port_of(self._listener)

    def serve(self, start: Start, secret: bytes | None, directory: str) -> dict[str, str]:
        """Serves the stores of a generation if rank 0 runs here; returns the variables by which workers find them.

        Args:
            start: The order to start the generation.
            secret: The secret of its workers, or None.
            directory: The job's private directory on this machine.
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
                self.open_torch_store()  # the workers may not load the plug-in that requests it
        return variables

    def requests_fileno(self) -> int:
        """Returns a descriptor that is readable once a worker requests torch's store; -1 if there is none to open."""
        return self._requests if self._torch_socket is not None else -1

    def open_torch_store(self) -> None:
        """Starts torch's store; has no effect if it runs already, or if another process listens at its port."""
        if self._torch_socket is None:
            return
        try:
            self._torch_socket.listen(BACKLOG)
            self._torch_server = _core.StoreServer(os.dup(self._torch_socket.fileno()))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # in use: the program serves its own store there
                self._say(f"MASTER_PORT cannot be served, which the env:// of torch.distributed needs: {error}")
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


def _port_of(listener: ListeningEndpoint) -> int:
    port: int = listener.getsockname()[1]
    return port


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def open_multiplexer(job: Job) -> Iterator[None]:
    """Opens the port through which this launcher and its workers are reached, if the job has one port."""
    before = multiplexer_variables()  # possibly of an outer job
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
    """Returns the variables by which workers find their launcher's multiplexer; empty without one."""
    return {name: os.environ[name] for name in (PORT_VARIABLE, GATE_VARIABLE) if name in os.environ}


def _set(variables: Mapping[str, str]) -> None:
    for name in (PORT_VARIABLE, GATE_VARIABLE):
        os.environ.pop(name, None)
    os.environ.update(variables)


def require_port(address: str, secret: bytes | None) -> None:
    """Checks that the multiplexer can listen at this machine's address, before any worker needs it.

    Raises:
        PortInUseError: another program has the port.
        StoreConnectionError: the address does not belong to this machine.
    """
    listen(address, 0, secret).close()


def port_beside(one_port: int | None) -> int | None:
    """Returns the MASTER_PORT of the workers in a job with one port, or None for other jobs.

    The port is the number after `one_port`. If the plug-in does not replace the store of torch.distributed, that store
    listens there, so the user must be able to predict the number.
    """
    if one_port is None:
        return None
    return one_port + 1 if one_port < 65535 else one_port - 1
