"""A bridge of TAP devices, run in a separate process, that delays and drops frames as a test requires.

It replaces netem, because not every kernel has it.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from forking import context, start_server

from hosts.namespaces import enter_network
from hosts.wire import VNET_HEADER, Conditions, Wire
from paceline.linux import die_with_parent

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 1, 2, 4
_LARGEST = VNET_HEADER + 14 + (1 << 16)
_AT_A_TIME = 64  # maximum number of frames read from one device before the other devices are checked


@dataclass(frozen=True)
class Port:
    """A device eth<network> that the bridge creates on a host; `namespace` is the path of the host's namespace."""

    host: int
    network: int
    address: str
    namespace: str


class Bridge:
    """The bridge process. Its devices exist from the construction of this object until `close`."""

    def __init__(self, ports: Sequence[Port], conditions: Conditions) -> None:
        self.conditions = conditions
        start_server()
        self._control, theirs = context.Pipe()
        self._process = context.Process(target=_carry, args=(theirs, ports, conditions))
        self._process.start()
        theirs.close()
        try:
            self._hear()
        except BaseException:
            self.close()
            raise

    def set(self, conditions: Conditions) -> None:
        """Sets conditions for every frame that is sent after this call returns."""
        self.conditions = conditions
        self._control.send(conditions)
        self._hear()

    def _hear(self) -> None:
        try:
            told = self._control.recv()
        except EOFError:
            raise RuntimeError("the bridge between the hosts has died") from None
        if told:
            raise RuntimeError(f"the bridge between the hosts failed:\n{told}")

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._control.close()

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _carry(control: Connection, ports: Sequence[Port], conditions: Conditions) -> None:
    os.setsid()  # a Ctrl-C in the terminal must not reach the bridge
    die_with_parent(os.getppid())
    try:
        taps = [_tap(port) for port in ports]
        _split_into_packets(taps, conditions.loss > 0)
    except BaseException:
        control.send(traceback.format_exc())
        return
    wire = Wire([(port.host, port.network, bytes.fromhex(port.address.replace(":", ""))) for port in ports], conditions)
    control.send(None)
    with suppress(EOFError, ConnectionResetError):
        while True:
            _turn(control, taps, wire)


def _turn(control: Connection, taps: list[int], wire: Wire) -> None:
    due_s = wire.due_s()
    patience_s = None if due_s is None else max(0.0, due_s - time.monotonic())
    for ready in select.select([control.fileno(), *taps], [], [], patience_s)[0]:
        if ready == control.fileno():
            wire.conditions = control.recv()
            _split_into_packets(taps, wire.conditions.loss > 0)
            control.send(None)
        else:
            _read(ready, taps.index(ready), wire)
    for port, frame in wire.arrived(time.monotonic()):
        with suppress(OSError):  # a device that is down or full drops frames, like a real one
            os.write(taps[port], frame)


def _read(tap: int, port: int, wire: Wire) -> None:
    now_s = time.monotonic()
    with suppress(BlockingIOError):
        for _ in range(_AT_A_TIME):
            wire.send(port, os.read(tap, _LARGEST), now_s)


def _tap(port: Port) -> int:
    """Creates a device in the host's namespace. The device exists as long as its descriptor is open."""
    enter_network(port.namespace)
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", f"eth{port.network}".encode(), flags))
    return tap


def _split_into_packets(taps: list[int], split: bool) -> None:
    """Splits the segments that hosts send into packets, so that packets can be lost one at a time."""
    for tap in taps:
        fcntl.ioctl(tap, _TUNSETOFFLOAD, 0 if split else _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
