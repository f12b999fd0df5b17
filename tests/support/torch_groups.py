"""The engine for accelerators on machines without one: CPU tensors, with ProcessGroupGloo in place of NCCL.

The program's thread represents its stream, so a call blocks where a device would only enqueue it. In a rank, `use`
makes backend="nccl" select this engine, and `told` makes groups fail. The registry imports this
module when the engine is used.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch.distributed import distributed_c10d as c10d

from paceline.comm.engine import api
from paceline.comm.engine.api import EngineContext
from paceline.comm.engine.torch_backend import device_engine
from paceline.comm.engine.torch_backend.device_engine import DeviceEngine
from paceline.comm.engine.torch_backend.process_groups import NEVER, OwnedProcessGroup, TorchStore, run_bounded

GPU_VARIABLE = "STAND_IN_GPU"
CALLS: list[str] = []
"""The operations and shutdowns of all groups in this process."""


def use() -> None:
    """Makes backend="nccl" select CPU tensors over gloo in this process."""
    api._ENGINES = {**api._ENGINES, "nccl": api._Entry("cpu", __name__)}
    device_engine.identify = lambda device: os.environ.get(GPU_VARIABLE, "")


@contextlib.contextmanager
def told(**settings: object) -> Iterator[None]:
    """Makes groups fail: they reject the operation `refuses`, never complete `loses`, or report the error `reports`."""
    _settings.update(settings)
    try:
        yield
    finally:
        _settings.clear()


_settings: dict[str, Any] = {}


def missing_piece(name: str) -> None:
    """Returns None, because no requirement is missing."""


def start(name: str, context: EngineContext) -> DeviceEngine:
    return DeviceEngine(name, context, construct)


def construct(store: TorchStore, rank: int, size: int) -> OwnedProcessGroup:
    return OwnedProcessGroup(StandIn(create_for_extension(store, rank, size, NEVER)), store)


def create_for_extension(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> c10d.ProcessGroupGloo:
    """Creates a group; `torch.distributed.Backend.register_backend` requires this signature for extensions."""
    CALLS.append("construct")
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return c10d.ProcessGroupGloo(store, rank, size, options)


class PolledWork:
    """A call that an abort terminates, unlike gloo's own calls. Without `work`, it completes only if it is aborted."""

    def __init__(self, work: c10d.Work | None, aborted: threading.Event) -> None:
        self._work = work
        self._aborted = aborted

    def wait(self) -> None:
        if self._work is None:
            self._aborted.wait()
        if self._work is None or not run_bounded(self._work.wait, math.inf, "stand-in", self._aborted.is_set):
            raise RuntimeError("the communicator was aborted")


class StandIn:
    """A ProcessGroupGloo that fails as configured by `told`."""

    def __init__(self, group: c10d.ProcessGroupGloo) -> None:
        self._group = group
        self._aborted = threading.Event()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._group, name)

        def call(*arguments: Any) -> Any:
            CALLS.append(name)
            if _settings.get("refuses") == name:
                raise RuntimeError("ncclInvalidArgument: Invalid value for an argument.\nException raised from run")
            if _settings.get("loses") == name:
                return PolledWork(None, self._aborted)
            return PolledWork(operation(*arguments), self._aborted)

        return call

    def get_error(self) -> Any:
        return SimpleNamespace(name=_settings.get("reports", "SUCCESS"))

    def shutdown(self) -> None:
        CALLS.append("shutdown")

    def abort(self) -> None:
        CALLS.append("abort")
        self._aborted.set()
        with contextlib.suppress(RuntimeError):
            self._group.abort()
