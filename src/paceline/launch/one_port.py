"""A launcher's part in a job whose machines have one port each: it listens there for itself and for its workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from paceline.launch.job import Job
from paceline.one_port.choice import GATE_VARIABLE, VARIABLE
from paceline.one_port.gate import Gate
from paceline.one_port.listener import random_name
from paceline.store.tcp import listen


@contextlib.contextmanager
def open_gate(job: Job) -> Iterator[None]:
    """Opens the gate through which this launcher and its workers are reached, if the job has one port."""
    before = gate_variables()  # they may be those of a job around this one
    _set({})
    try:
        if job.one_port is None:
            yield
            return
        name = random_name()
        with contextlib.closing(Gate(job.one_port, name)):
            _set({VARIABLE: str(job.one_port), GATE_VARIABLE: name})
            yield
    finally:
        _set(before)


def gate_variables() -> dict[str, str]:
    """Returns the variables by which workers find the gate of their launcher; none if there is no gate."""
    return {name: os.environ[name] for name in (VARIABLE, GATE_VARIABLE) if name in os.environ}


def _set(variables: Mapping[str, str]) -> None:
    for name in (VARIABLE, GATE_VARIABLE):
        os.environ.pop(name, None)
    os.environ.update(variables)


def require_port(address: str, secret: bytes | None) -> None:
    """Makes sure that the gate can listen at this machine's address, before any worker needs it.

    Raises:
        PortInUseError: another program has the port.
        StoreConnectionError: the address is not this machine's.
    """
    listen(address, 0, secret).close()


def port_beside(one_port: int | None) -> int | None:
    """Returns the MASTER_PORT of the workers in a job with one port; None if it has none.

    It is a number behind the port. A store of torch.distributed, where the plug-in does not replace it, really listens
    there, so it is one that the user can know beforehand.
    """
    if one_port is None:
        return None
    return one_port + 1 if one_port < 65535 else one_port - 1
