"""Opens a group on each device that its tensors are on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from paceline.engine.api import OpenGroup
from paceline.engine.failures import Code
from paceline.engine.registry import engines_for
from paceline.record.recorder import close_group

Opener = Callable[[torch.device], OpenGroup]


class Devices:
    """Finds the open group for a call's tensors; on devices other than the CPU the first call opens it.

    Args:
        on_cpu: the open group for CPU tensors.
        openers: the functions that open it on other devices, by the device's type.
        backend: the backend's name, for messages.
        record: adds an open group, on a type of device, to the recording; returns its serial there.
        advice: what a user can do about a tensor on another device; by default this names the engine for it.
    """

    def __init__(
        self,
        on_cpu: OpenGroup,
        openers: Mapping[str, Opener],
        backend: str,
        record: Callable[[OpenGroup, str], int],
        advice: str = "",
    ) -> None:
        self._record = record
        self._recorded = [record(on_cpu, "cpu")]
        self._on_cpu = on_cpu
        self._openers = openers
        self._backend = backend
        self._advice = advice
        self._open: dict[torch.device, OpenGroup] = {}
        self._opening = threading.Lock()

    @property
    def types(self) -> frozenset[str]:
        """Returns the types of device that have an engine."""
        return frozenset({"cpu", *self._openers})

    def of(self, tensors: Sequence[torch.Tensor], call: object) -> OpenGroup:
        """Returns the open group on the device of `tensors`, or on the CPU if there are none.

        The text of `call` is the call's name.

        Raises:
            TypeError: there is no engine for the device, or the tensors are on several devices.
        """
        if all(tensor.is_cpu for tensor in tensors):
            return self._on_cpu
        device = tensors[0].device
        for tensor in tensors:
            if tensor.device != device:
                raise TypeError(f"{call} got tensors on {device} and {tensor.device}; one call takes one device")
        with self._opening:
            if device not in self._open:
                self._open[device] = self._opener(device, call)(device)
                self._recorded.append(self._record(self._open[device], device.type))
            return self._open[device]

    def abort(self) -> None:
        """Ends the calls on all devices; any thread may call this."""
        for opened in self._all():
            opened.abort()

    def failure(self) -> int:
        """Returns the `failures.Code` of a failure on any device; OK without one."""
        return next(filter(None, (opened.failure() for opened in self._all())), Code.OK)

    def _all(self) -> list[OpenGroup]:
        # Without the lock, which a thread that opens a group on a further device holds while it waits for other ranks.
        return [self._on_cpu, *self._open.values()]

    def close(self) -> None:
        """Ends the group on all devices, and releases the functions that would open it on others; idempotent."""
        self._openers = {}
        self._on_cpu.close()
        for opened in self._open.values():
            opened.close()
        for serial in self._recorded:
            close_group(serial)

    def _opener(self, device: torch.device, call: object) -> Opener:
        opener = self._openers.get(device.type)
        if opener is None:
            fitting = engines_for(device.type)
            advice = self._advice or (
                f"choose one with backend='cpu:paceline,{device.type}:{fitting[0]}', or " if fitting else ""
            )
            raise TypeError(
                f"{call} got a tensor on {device}; the group's backend {self._backend!r} has no engine for it: "
                f"{advice}pass tensor.cpu()"
            )
        return opener
