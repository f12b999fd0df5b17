"""`Engine`, the interface that engines implement to connect ranks and exchange tensors, and the list of all engines.

An engine serves one type of device. It must

- open groups of ranks (`Engine.open_group`), each with a channel for collectives and an interface for messages
  (`channel.py` defines both), and close them;
- enforce a deadline on every wait, and report the result of a call as an `OutcomeCode`: TIMED_OUT, PEER_LOST or
  MISMATCH if the engine can detect these, and REFUSED with the library's message in all other cases
  (`channel.CallFailure`);
- run a group's calls in the order in which they are made, whether they are synchronous or not.

An engine need not handle

- tensors (views, copies, dtypes, argument checks), for which `group/` is responsible;
- PREMUL_SUM's factors, and collectives on objects, on coalesced tensors or on several GPUs, which are translated into
  ordinary channel calls;
- the order of calls and a thread for asynchronous calls, which `adapters/serial_channel.py` provides;
- operations, dtypes and reductions that its library lacks, because `adapters/schedule_executor.py` can run schedules
  over plain sends and receives.

An engine's module implements the two functions of `EngineModule` and is listed in `_ENGINES`; `tests/engines` checks
the behavior of engines. `choose` selects an engine for each type of device, and `start` starts it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple, Protocol, cast

import torch

from paceline import _core
from paceline.comm.engine.adapters.device_streams import current_accelerator
from paceline.comm.engine.channel import EngineChannel, Messages, OutcomeCode
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.formation import Formation
from paceline.comm.rendezvous.rendezvous import RendezvousResult
from paceline.comm.schedule.cost_model import CostModel, LinkCost
from paceline.comm.store.store import Store


@dataclass
class KnownCosts:
    """Link costs measured by earlier engines; see `native/cost_measurement.py`.

    Attributes:
        models: the cost models, keyed by the hosts on which they were measured.
        pairs: the costs of a message between two hosts, keyed by the two host names in alphabetical order.
    """

    models: dict[tuple[str, ...], CostModel] = field(default_factory=dict)
    pairs: dict[tuple[str, str], LinkCost] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineContext:
    """The environment in which an engine starts.

    Args:
        store: the store that the ranks share; it must outlive the engine.
        rank, world_size: this rank and the number of ranks.
        timeout_s: the time to wait for the other ranks, in seconds.
        formation: the default group's formation; later groups create their own formations.
        members: the ranks, or () if the engine discovers them itself, as the native engine does.
        peer: the host of the rendezvous, if it is known.
        interface: the interface or address to which other hosts connect; see `network_settings.own_address`.
        algorithm: the algorithm to force for every collective that it implements; these collectives then run as
            schedules.
        costs: the link costs measured by earlier engines, or None.
    """

    store: Store
    rank: int
    world_size: int
    timeout_s: float
    formation: Formation | None = None
    members: tuple[RankIdentity, ...] = ()
    peer: str | None = None
    interface: str | None = None
    algorithm: str | None = None
    costs: KnownCosts | None = None

    def forming(self, what: str) -> contextlib.AbstractContextManager[Formation]:
        """Returns the default group's formation if it is open, and otherwise a new formation identified by `what`."""
        if self.formation is not None and self.formation.is_open:
            return contextlib.nullcontext(self.formation)
        return Formation(self.store, self.rank, self.world_size, what)


@dataclass(eq=False)
class OpenGroup:
    """A group's connections, until `close` is called.

    Attributes:
        channel: the channel that runs the group's collectives.
        messages: the interface for messages to and from single ranks in the group.
        parts: the connections below the channel, which the group also aborts and closes.
    """

    channel: EngineChannel
    messages: Messages
    parts: Sequence[OpenGroup | _core.ScheduleGroup] = ()

    def record_as(self, group: int) -> None:
        """Records later calls and messages under the group's serial number (`record.recorder.open_group`)."""
        self.channel.record_as(group)
        self.messages.record_messages_as(group)

    def abort(self) -> None:
        """Aborts calls and messages; see `EngineChannel.abort`."""
        for part in (self.channel, *self.parts):
            part.abort()

    def failure(self) -> int:
        """Returns the `OutcomeCode` for a failed call or message, or OK."""
        return next(filter(None, (part.failure() for part in (self.channel, *self.parts))), OutcomeCode.OK)

    def close(self) -> None:
        """Closes the channel and the messages; idempotent."""
        for part in (self.channel, *self.parts):
            part.close()


class Engine(Protocol):
    """Connects the ranks in the default group and in all other groups, until `close` is called."""

    @property
    def name(self) -> str:
        """The engine's name, as used in `backend=`."""
        ...

    @property
    def members(self) -> tuple[RankIdentity, ...]:
        """The members of the default group."""
        ...

    def open_group(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        identity: int = 0,
        algorithm: str | None = None,
        device: torch.device | None = None,
    ) -> OpenGroup:
        """Connects the group of `ranks`; only its members call this.

        Args:
            ranks: the members' ranks in the default group, in the order of their group ranks, including this rank.
            timeout_s: the time to wait for the other members, in seconds.
            identity: a number below 2^63 that is the same on all members. No other group of this engine may use it,
                except the same group on another device.
            algorithm: the algorithm to force; None leaves the choice to the engine.
            device: the device of the tensors, to which all addresses in calls refer; the CPU if None.

        Raises:
            ValueError: the engine does not have `algorithm`.
            RendezvousTimeoutError: a member did not open the group in time.
        """
        ...

    def close(self) -> None:
        """Closes every group and reports to the other ranks that this rank has left; idempotent."""


class EngineModule(Protocol):
    """The functions in an engine's module, which is imported when the engine is chosen."""

    def missing_piece(self, name: str) -> str | None:
        """Describes the first prerequisite that this machine lacks and how to fix it; returns None if there is none.

        `name` is the engine's name, since one module may implement several engines.
        """

    def start(self, name: str, context: EngineContext) -> Engine:
        """Starts the engine with this name; every rank calls this."""
        ...


class _Entry(NamedTuple):
    device_type: str
    module: str
    has_rendezvous: bool = False  # whether there is a `perform_rendezvous` for ranks started by the engine's launcher


_DEVICE_ENGINE = "paceline.comm.engine.torch_backend.device_engine"
# A new engine needs a module (`engine.api.EngineModule`) and an entry in this table.
_ENGINES: Mapping[str, _Entry] = {
    "paceline": _Entry("cpu", "paceline.comm.engine.native.engine"),
    "gloo": _Entry("cpu", "paceline.comm.engine.torch_backend.gloo"),
    "mpi": _Entry("cpu", "paceline.comm.engine.mpi.engine", has_rendezvous=True),
    "nccl": _Entry("cuda", _DEVICE_ENGINE),
}
_FOR_CPU = "paceline"
_STAGE = ("paceline", "gloo")  # engines for CPU tensors that can also transfer staged accelerator tensors
_FORM = "to choose one engine per device type, write 'cpu:paceline,cuda:nccl'"


@dataclass(frozen=True)
class BackendChoice:
    """The parsed argument `backend`: the string that `get_backend` returns, and the engine for each type of device.

    Attributes:
        is_default: True if the program did not specify a backend.
    """

    text: str
    engines: Mapping[str, str]
    is_default: bool = False

    def without(self, device_types: Sequence[str]) -> BackendChoice:
        """Returns the choice without the engines for these types of devices."""
        left = {device_type: name for device_type, name in self.engines.items() if device_type not in device_types}
        return BackendChoice(_spelled(left), left, self.is_default)


def choose(backend: str | None) -> BackendChoice:
    """Returns the engines specified by `backend`, for example "mpi" or "cpu:paceline,cuda:nccl".

    If `backend` is None, the best usable engine for each type of device is chosen. There is always an engine for CPU
    tensors, because objects are sent as CPU tensors; this engine is `paceline` if `backend` does not specify another
    one. Tensors on accelerators without an engine are staged through host memory and use the engine for CPU tensors;
    see `staged_types`.

    Raises:
        ValueError: an engine does not exist or does not support the given device, or two engines are named for one
            device.
    """
    chosen: dict[str, str] = {}
    if backend is None:
        # Unlike `torch.cuda.is_available`, `device_count` does not initialize the driver, which CPU jobs do not need.
        chosen = {"cpu": _FOR_CPU}
        if torch.cuda.device_count() and missing_piece("nccl") is None:
            chosen["cuda"] = "nccl"
        return BackendChoice(_spelled(chosen), chosen, is_default=True)
    for part in backend.lower().split(","):
        device_type, _, name = part.strip().rpartition(":")
        entry = _entry(name)
        if entry is None:
            raise ValueError(f"backend {backend!r} is not known; the backends are {', '.join(_ENGINES)}; {_FORM}")
        served = entry.device_type
        if device_type not in ("", served) and (served != "cpu" or name not in _STAGE):
            raise ValueError(f"backend {backend!r}: {name} takes tensors on {served}, not on {device_type}; {_FORM}")
        served = device_type or served
        if served in chosen:
            raise ValueError(f"backend {backend!r} specifies two engines for {served}; {_FORM}")
        chosen[served] = name
    return BackendChoice(_spelled(chosen), {"cpu": _FOR_CPU} | chosen)


def engines_for(device_type: str) -> list[str]:
    """Returns the names of the engines that accept tensors on this type of device."""
    known = [name for name, entry in _ENGINES.items() if entry.device_type == device_type]
    other = None if known else _process_groups().backend_for(device_type)
    return known if other is None else [other]


def is_staged(device_type: str, name: str) -> bool:
    """Returns True if engine `name` stages tensors on this type of device through host memory."""
    return device_type != "cpu" and name in _STAGE


def staged_types(backend: BackendChoice) -> dict[str, str]:
    """Returns the engines that stage tensors through host memory, by type of accelerator."""
    chosen = {device_type: name for device_type, name in backend.engines.items() if is_staged(device_type, name)}
    if backend.engines["cpu"] in _STAGE:
        others = [device_type for device_type in _accelerators() if device_type not in backend.engines]
        chosen |= dict.fromkeys(others, backend.engines["cpu"])
    return chosen


def missing_piece(name: str) -> str | None:
    """Describes the first missing prerequisite of engine `name` and how to fix it; returns None if there is none."""
    return f"this version has no engine {name!r}" if _entry(name) is None else _module(name).missing_piece(name)


def require(name: str, rank: int) -> None:
    """Checks that engine `name` can be used on this machine.

    Raises:
        ValueError: a prerequisite is missing; the message describes it and the fix.
    """
    missing = missing_piece(name)
    if missing is not None:
        raise ValueError(f"rank {rank}: backend {name!r} cannot be used: {missing}")


def start(name: str, context: EngineContext) -> Engine:
    """Starts engine `name` and returns it.

    Raises:
        ValueError: see `require`.
    """
    require(name, context.rank)
    return _module(name).start(name, context)


def launcher_rendezvous(backend: BackendChoice, rank: int) -> Callable[[float], RendezvousResult] | None:
    """Returns the rendezvous function of an engine whose launcher (mpirun) starts the processes and assigns ranks.

    The function takes a timeout in seconds. The result is None if no engine in `backend` has such a launcher.

    Raises:
        ValueError: see `require`.
    """
    for name in backend.engines.values():
        entry = _entry(name)
        if entry is not None and entry.has_rendezvous:
            require(name, rank)
            return cast("Callable[[float], RendezvousResult]", importlib.import_module(entry.module).perform_rendezvous)
    return None


def _accelerators() -> list[str]:
    """Returns the types of accelerators that this build of PyTorch supports, whether or not hardware is present."""
    present = current_accelerator()
    found = [] if present is None else [present.type]
    return [*found, "cuda"] if torch.backends.cuda.is_built() and "cuda" not in found else found


def _spelled(engines: Mapping[str, str]) -> str:
    if len(engines) == 1:
        device_type, name = next(iter(engines.items()))
        entry = _entry(name)
        if entry is not None and device_type == entry.device_type:
            return name
    return ",".join(f"{device_type}:{name}" for device_type, name in engines.items())


def _entry(name: str) -> _Entry | None:
    """Returns the engine with this name: Paceline's, or one that wraps PyTorch's process group for an accelerator."""
    if name in _ENGINES:
        return _ENGINES[name]
    served = _process_groups().device_types(name) if _process_groups().is_registered(name) else ()
    return _Entry(served[0], _DEVICE_ENGINE) if served else None


def _process_groups() -> ModuleType:
    """Returns the module `process_groups`, which is imported only when needed, because it imports torch.distributed."""
    return importlib.import_module("paceline.comm.engine.torch_backend.process_groups")


def _module(name: str) -> EngineModule:
    entry = _entry(name)
    assert entry is not None, name
    return cast(EngineModule, importlib.import_module(entry.module))
