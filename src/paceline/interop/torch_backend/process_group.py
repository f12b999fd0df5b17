"""A torch.distributed process group that uses Paceline's engine.

Each method maps to one Paceline call. Methods that PyTorch has renamed are available under both names. Some PyTorch
releases pass plain values instead of an option object: `opts` may then be the root's rank, a reduction or a timeout,
and a single tensor need not be in a list.

After a failure a program can recover with `abort`, `shrink_group` and `_reconfigure`. Error messages from
`monitored_barrier` begin with gloo's message, because programs search for it.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import astuple, dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from multiprocessing import util
from typing import Any

import torch
import torch.distributed as torch_dist
from torch._C import _distributed_c10d as torch_core
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import Work as TorchWork
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world

from paceline.comm.engine.api import choose, staged_types
from paceline.comm.engine.channel import OutcomeCode, ReduceOp
from paceline.comm.engine.failures import ProcessIdentity, RankIdentity
from paceline.comm.group.buffers import Tensors, unpack_single
from paceline.comm.group.call_plan import one_list, parts_by_rank, reduction_of, time_limit
from paceline.comm.group.collectives import coalesced, collectives
from paceline.comm.group.default import World
from paceline.comm.group.eager import eager_methods
from paceline.comm.group.work import JoinedWork, Work
from paceline.durations import Timeout, to_seconds
from paceline.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    GroupAbortedError,
    PeerLostError,
    RendezvousError,
    short_repr,
)
from paceline.interop.torch_backend.rendezvous import OTHER_DEVICES, GroupRendezvous, form_group, require_own_device
from paceline.interop.torch_backend.work import FinishedWork, RunningWork, keep_alive

_CPU = torch.device("cpu")
_ERRORS = {OutcomeCode.OK: "SUCCESS", OutcomeCode.TIMED_OUT: "TIMEOUT", OutcomeCode.PEER_LOST: "REMOTE_ERROR"}
_SHRINK_FACTORY = "_create_shrunk_process_group"
_ABORT = 1  # the value of torch's SHRINK_ABORT
_HANDLE_PREFIX = "paceline:"

Call = Callable[[bool, Timeout | None], Work | None]
Lists = Sequence[Sequence[torch.Tensor]] | Sequence[torch.Tensor]


class AbortHooks:
    """User functions that run once before a failed group is aborted. Concurrent callers wait for the functions."""

    def __init__(self) -> None:
        self._hooks: dict[int, Callable[[], None]] = {}
        self._running = threading.RLock()  # reentrant, because a hook may abort the group
        self._ran = False

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Adds a hook; replaces any hook with the same id."""
        self._hooks[hook_id] = hook

    def remove(self, hook_id: int) -> None:
        """Removes the hook with this id, if any."""
        self._hooks.pop(hook_id, None)

    def run(self) -> None:
        """Runs the hooks unless they have already run since the last `rearm`; logs errors."""
        with self._running:
            if self._ran or not self._hooks:
                return
            self._ran = True
            for hook_id, hook in list(self._hooks.items()):
                try:
                    hook()
                except Exception:  # a failing hook must not prevent the abort
                    logging.getLogger(__name__).exception("the abort hook %d failed", hook_id)

    def rearm(self) -> None:
        """Enables the hooks to run again on the next failure."""
        self._ran = False


@dataclass(frozen=True, order=True)
class ReconfigureHandle:
    """The identity of a process in a process group, as used by `_reconfigure`.

    The handle does not change during the lifetime of the group object, even if the ranks change.
    """

    rank: int  # the rank when the group object was created; handles are ordered by it
    token: str  # random text that distinguishes the groups in a process
    host: str
    namespace: str
    pid: int
    started: int

    @staticmethod
    def mine(rank: int) -> ReconfigureHandle:
        """Creates a handle for a group in which this process has rank `rank`."""
        me = ProcessIdentity.mine()
        return ReconfigureHandle(rank, secrets.token_hex(8), socket.gethostname(), me.namespace, me.pid, me.started)

    @staticmethod
    def parse(text: str) -> ReconfigureHandle:
        """Parses a handle from its text."""
        try:
            rank, token, host, namespace, pid, started = json.loads(text.removeprefix(_HANDLE_PREFIX))
            handle = ReconfigureHandle(int(rank), str(token), str(host), str(namespace), int(pid), int(started))
        except (ValueError, TypeError):
            handle = None
        if handle is None or not text.startswith(_HANDLE_PREFIX):
            raise ValueError(
                f"{text!r} is not a handle of the backend 'paceline'; pass what "
                "torch.distributed._get_reconfigure_handle() returned on each rank"
            )
        return handle

    def __str__(self) -> str:
        return _HANDLE_PREFIX + json.dumps(astuple(self), separators=(",", ":"))

    def member(self, rank: int) -> RankIdentity:
        """Returns the identity of this process with rank `rank`."""
        return RankIdentity(rank, self.host, self.pid, ProcessIdentity(self.namespace, self.pid, self.started))


def in_rank_order(handles: AbstractSet[str] | list[str]) -> list[ReconfigureHandle]:
    """Returns the handles in the order of the new ranks. A list keeps its order, and a set is sorted by former rank."""
    order = [ReconfigureHandle.parse(text) for text in handles]
    if not order:
        raise ValueError("_reconfigure was given no handles; pass those of all ranks that will form the group")
    if len(set(order)) < len(order):
        twice = next(handle for handle in order if order.count(handle) > 1)
        raise ValueError(f"_reconfigure was given the handle of {twice.member(twice.rank)} twice; pass each once")
    return sorted(order) if isinstance(handles, AbstractSet) else order


class ClosedReason(Enum):
    """The reason why a group has no connections."""

    DESTROYED = "destroyed"
    ABORTED = "aborted"
    NOT_MET = "not met"


def _replace_shrink_group(kind: type[torch_dist.ProcessGroup]) -> None:
    """Makes `shrink_group` return groups of class `kind` unchanged. Other groups are not affected.

    `shrink_group` wraps the new backend in a process group. The process group accepts only instances of the C++ class
    `Backend`, but a Paceline group is itself a process group.
    """
    make = getattr(distributed_c10d, _SHRINK_FACTORY)
    if getattr(make, "kind", None) is kind:
        return

    def make_or_return(new_backend: Any, ranks: Sequence[int], metadata: Any, is_default_group: bool) -> Any:
        if not isinstance(new_backend, kind):
            return make(new_backend, ranks, metadata, is_default_group)
        former = metadata["original_group_name"]
        # PyTorch restarts its group numbers afterward, so new groups would find keys of earlier groups in the old
        # store.
        metadata["store"] = new_backend.get_group_store()
        new_backend._set_group_name(metadata["new_group_name"])
        new_backend._set_group_desc("default:shrunken" if is_default_group else f"{former}:shrunk")
        return new_backend

    make_or_return.kind = kind  # type: ignore[attr-defined]
    setattr(distributed_c10d, _SHRINK_FACTORY, make_or_return)


class ConnectionDescriptor:
    """A descriptor for an attribute that exists only while a group is connected; otherwise, access raises an error.

    `__getattr__` would serve the same purpose, but torch.compile does not support it in a process group.
    """

    def __get__(self, group: TorchProcessGroup | None, kind: type[TorchProcessGroup]) -> Any:
        if group is None:
            return self
        raise group.absence_error()


@eager_methods
class TorchProcessGroup(torch_dist.ProcessGroup):
    """A process group created by torch.distributed's `init_process_group` or `new_group`.

    PyTorch reads names, ranks and devices from a group's backend; this group is its own backend. After a failure, a
    group can be aborted, shrunk, or given different ranks with `reconfigure`. `world` is the connected Paceline group;
    if it is None, `reconfigure` connects the ranks later.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_tensor_alloc = False
    supports_time_estimate = False
    supports_window = False
    supports_reconfigure = True
    supports_abort_hooks = True
    supports_shrinking = hasattr(distributed_c10d, "shrink_group") and hasattr(distributed_c10d, _SHRINK_FACTORY)
    bound_device_id: torch.device | None = None

    _group = ConnectionDescriptor()
    _world = ConnectionDescriptor()
    _store = ConnectionDescriptor()

    def __init__(self, rendezvous: GroupRendezvous, world: World | None) -> None:
        super().__init__(rendezvous.rank, rendezvous.size)
        self._store = rendezvous.store
        self._timeout = rendezvous.timeout
        self._rank, self._size, self._named = rendezvous.rank, rendezvous.size, rendezvous.named
        self._members: tuple[RankIdentity, ...] = ()  # the members when the group was last connected
        self._absence = ClosedReason.NOT_MET
        self._name = ""
        self._description = "undefined"
        self._backend = "paceline"
        self._handle = ReconfigureHandle.mine(rendezvous.named[rendezvous.rank])
        self._abort_hooks = AbortHooks()
        self._failure = OutcomeCode.OK  # the failure of the group that was last aborted
        self._coalescing: list[Work] | None = None
        if world is not None:
            self._adopt(rendezvous, world)

    def __repr__(self) -> str:
        return f"<paceline process group {self._name or 'default'}, rank {self._rank} of {self._size}>"

    def getBackendName(self) -> str:
        """Returns the name for torch's C++ code. Never "gloo", because torch would cast the group to its own class."""
        return "paceline"

    def name(self) -> str:
        """Returns the backend name that is reported to programs."""
        return self._backend

    _get_backend_name = name

    def report_backend_as(self, backend: str) -> None:
        """Sets the backend name that is reported to programs and in profiles."""
        self._backend = backend
        if (group := vars(self).get("_group")) is not None:
            group.profiled_as = backend

    @property
    def world(self) -> World | None:
        """The group for Paceline's own functions, or None if this group is closed or is not torch's default group."""
        return vars(self).get("_world")

    def rank(self) -> int:
        """Returns this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Returns the number of ranks."""
        return self._size

    getRank = rank
    getSize = size

    def getGroupName(self) -> str:
        """Returns the group's name, as set by torch."""
        return self._name

    def getGroupDesc(self) -> str:
        """Returns the group's description."""
        return self._description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def setGroupName(self, name: str) -> None:
        """Sets `group_name`."""
        self._name = _text(name)

    def setGroupDesc(self, description: str) -> None:
        """Sets `group_desc`."""
        self._description = _text(description)

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def get_group_store(self) -> Any:
        """Returns the store used for the group's rendezvous."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        """Returns no devices until torch has registered the group.

        PyTorch 2.15 attaches a recorder to new groups that report devices, but the recorder supports only C++ backends.
        """
        return [_CPU] if self in _world.pg_map else []

    def _get_backend(self, device: torch.device) -> TorchProcessGroup:
        device_type = torch.device(device).type
        if device_type == "cpu":
            return self
        if device_type not in staged_types(choose("paceline")):
            raise RuntimeError(
                f"{self!r} has no backend for the device {device}; it takes tensors on the CPU and on the accelerator "
                f"of this PyTorch: {OTHER_DEVICES}move them there"
            )
        require_own_device(self._name, torch.device(device))
        return self

    get_backend = _get_backend

    def _set_default_backend(self, backend_type: object) -> None:
        """Has no effect, because this is the group's only backend."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Has no effect, because the caller waits for each call."""

    def _set_sequence_number_for_group(self) -> None:
        """Has no effect, because the core numbers the calls."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout for all later calls."""
        self._timeout = timeout
        if (group := vars(self).get("_group")) is not None:
            group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Closes the group on this rank. Idempotent."""
        self._close(ClosedReason.DESTROYED)
        vars(self).pop("_store", None)  # device meshes keep this object alive, but the store's sockets must be closed

    def allreduce(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> TorchWork:
        """Reduces one tensor, or several tensors in one call, over all ranks."""
        by = reduction_of(opts if op is None else op)
        return self._finish(opts, timeout, tensors, partial(self._group.all_reduce, unpack_single(tensors), by))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> TorchWork:
        """Reduces tensors with different dtypes over all ranks."""
        call = coalesced.all_reduce_coalesced
        return self._finish(opts, None, tensors, partial(call, tensors, reduction_of(opts), self._group))

    def broadcast(
        self, tensors: Tensors, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> TorchWork:
        """Copies the root's tensors to all ranks."""
        source = _root(opts if root is None else root)
        return self._finish(opts, timeout, tensors, partial(self._group.broadcast, tensors, source))

    def reduce(
        self,
        tensors: Tensors,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Reduces tensors over all ranks; only the root receives the result."""
        target = _root(opts if root is None else root)
        by = reduction_of(opts if op is None and hasattr(opts, "reduceOp") else op)
        return self._finish(opts, timeout, tensors, partial(self._group.reduce, tensors, target, by))

    def allgather(
        self, output_tensors: Lists, input_tensors: Tensors, opts: Any = None, *, timeout: timedelta | None = None
    ) -> TorchWork:
        """Copies every rank's tensor to all ranks."""
        outputs = one_list(output_tensors, "allgather")
        return self._finish(opts, timeout, outputs, partial(self._group.all_gather, outputs, input_tensors))

    def allgather_coalesced(
        self, output_lists: list[list[torch.Tensor]], input_list: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Gathers several tensors per rank on all ranks; `output_lists[r]` receives the tensors from rank r."""
        outputs = [output for outputs in output_lists for output in outputs]
        call = coalesced.all_gather_coalesced
        return self._finish(opts, None, outputs, partial(call, output_lists, input_list, self._group))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Gathers every rank's tensor into one tensor on all ranks, concatenated in rank order."""
        return self._finish(
            opts, None, [output], partial(collectives.all_gather_into_tensor, output, input, self._group)
        )

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Performs `all_gather_single` for several tensors."""
        call = coalesced.all_gather_into_tensor_coalesced
        return self._finish(opts, None, outputs, partial(call, outputs, inputs, self._group))

    def gather(
        self,
        output_tensors: Lists,
        input_tensors: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Copies every rank's tensor to the root."""
        target = _root(opts if root is None else root)
        outputs = one_list(output_tensors, "gather") if self.rank() == target else None
        return self._finish(opts, timeout, outputs or [], partial(self._group.gather, outputs, input_tensors, target))

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Gathers every rank's tensor into one tensor on the root, concatenated in rank order."""
        target = _root(opts)
        parts = None
        if self.rank() == target:
            parts = parts_by_rank(output, input.numel(), self._group.rank_map, "gather_single", "output")
        return self._finish(opts, None, [output], partial(self._group.gather, parts, input, target))

    def scatter(
        self,
        output_tensors: Tensors,
        input_tensors: Lists,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> TorchWork:
        """Sends one of the root's tensors to each rank."""
        source = _root(opts if root is None else root)
        inputs = one_list(input_tensors, "scatter") if self.rank() == source else None
        return self._finish(opts, timeout, output_tensors, partial(self._group.scatter, output_tensors, inputs, source))

    def reduce_scatter(
        self,
        output_tensors: Tensors,
        input_tensors: Lists,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> TorchWork:
        """Reduces lists of tensors elementwise over the ranks; rank r receives the r-th result."""
        by, inputs = reduction_of(opts if op is None else op), one_list(input_tensors, "reduce_scatter")
        return self._finish(
            opts, timeout, output_tensors, partial(self._group.reduce_scatter, output_tensors, inputs, by)
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        """Performs `reduce_scatter` on one tensor that contains the parts in rank order."""
        call = collectives.reduce_scatter_tensor
        return self._finish(opts, None, [output], partial(call, output, input, reduction_of(opts), self._group))

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """Performs `reduce_scatter_single` for several tensors."""
        call = coalesced.reduce_scatter_tensor_coalesced
        return self._finish(opts, None, outputs, partial(call, outputs, inputs, reduction_of(opts), self._group))

    def alltoall(
        self,
        output_tensors: list[torch.Tensor],
        input_tensors: list[torch.Tensor],
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Sends a separate tensor from each rank to every rank."""
        return self._finish(
            opts, timeout, output_tensors, partial(self._group.all_to_all, output_tensors, input_tensors)
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        *,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        """Performs `alltoall` on tensors that contain the parts in rank order, by default with equal sizes."""
        sizes = output_split_sizes or None, input_split_sizes or None
        call = collectives.all_to_all_single
        return self._finish(opts, timeout, [output], partial(call, output, input, *sizes, self._group))

    def barrier(self, opts: Any = None, *, timeout: timedelta | None = None) -> TorchWork:
        """Waits until all ranks have called this method."""
        return self._finish(opts, timeout, [], self._group.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Waits until all ranks have called this method. Error messages begin with gloo's message.

        As with gloo, `timeout` applies to rank 0. The other ranks wait for `timeout` or the
        group's timeout, whichever is longer.
        """
        limit = self._group.timeout if timeout is None or timeout < timedelta(0) else timeout
        try:
            self._group.barrier(timeout=limit if self._rank == 0 else max(limit, self._group.timeout))
        except CollectiveError as error:
            self._note_failure()
            prepend_gloo_message(error, self._rank, self._group.ranks, limit, wait_all_ranks)
            raise

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> TorchWork:
        """Sends tensors to one rank."""
        return self._torch_work(self._group.send(tensors, dst, tag, async_op=True), tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> TorchWork:
        """Receives tensors from one rank."""
        return self._torch_work(self._group.recv(tensors, src, tag, async_op=True), tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> TorchWork:
        """Receives tensors from any rank."""
        return self._torch_work(self._group.recv(tensors, -1, tag, async_op=True), tensors)

    # The names of these methods in other PyTorch releases.

    _allgather_base = all_gather_single
    gather_into_tensor = gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> TorchWork:
        works, self._coalescing = self._coalescing or [], None
        return RunningWork(JoinedWork(works, "coalesced calls", []), [])

    def _finish(self, opts: Any, timeout: timedelta | None, results: Tensors, call: Call) -> TorchWork:
        # PyTorch releases without `asyncOp` in their options call `wait` themselves.
        background = self._coalescing is not None or getattr(opts, "asyncOp", True)
        try:
            work = call(background, time_limit(opts, timeout))
        except CollectiveError:
            self._note_failure()
            raise
        return self._torch_work(work, results)

    def _torch_work(self, work: Work | None, results: Tensors) -> TorchWork:
        if work is not None and self._abort_hooks:
            work.when_over(lambda: self._note_failure() if work.exception() is not None else None)
        written = [results] if isinstance(results, torch.Tensor) else results
        if work is None:
            return keep_alive(FinishedWork(written))
        if self._coalescing is not None:
            self._coalescing.append(work)
        return keep_alive(RunningWork(work, written))

    # Failures and reconfiguration.

    def abort(self) -> None:
        """Fails all current and later calls on all ranks with `GroupAbortedError`, and closes this rank's connections.

        Any thread may call this while others are waiting in calls on the group. The abort hooks run first.
        """
        world = vars(self).get("_world")
        if world is None:
            return
        self._abort_hooks.run()
        world.group.abort()
        self._failure = world.group.failure()
        self._close(ClosedReason.ABORTED)

    def get_error(self) -> Any:
        """Returns the group's failure as torch's `ErrorType`, without communication.

        SUCCESS: the group is usable. TIMEOUT: a call timed out. REMOTE_ERROR: a rank died or left. COMM_ERROR: a rank
        called `abort`, or the group failed for another reason.
        """
        world = vars(self).get("_world")
        code = self._failure if world is None else world.group.failure()
        return getattr(torch_core.ErrorType, _ERRORS.get(code, "COMM_ERROR"))

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Registers a hook that runs once: before `abort` takes effect, or after a call has failed."""
        self._abort_hooks.add(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Removes the hook with this id."""
        self._abort_hooks.remove(hook_id)

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None
    ) -> TorchProcessGroup:
        """Returns a new group with the remaining ranks, renumbered from 0. All remaining ranks must call this.

        The excluded ranks may be dead. The rendezvous uses torch's store, whose server must be running. This group does
        not change unless `shrink_flags` requests an abort.

        Raises:
            RendezvousError: a remaining rank did not arrive or died.
        """
        if opts_override is not None:
            raise ValueError(f"the backend 'paceline' has no options; got {type(opts_override).__name__}")
        staying = [rank for rank in range(self._size) if rank not in ranks_to_exclude]
        _replace_shrink_group(type(self))
        expected = [self._members[rank] for rank in staying] if self._members else []
        if shrink_flags & _ABORT:
            self.abort()
        key = f"shrunk/{'.'.join(str(rank) for rank in sorted(ranks_to_exclude))}"
        attempt = self._store.add(f"{key}/{self._rank}", 1)
        named = range(len(staying)) if self._is_default() else [self._named[rank] for rank in staying]
        occasion = f"{key}/{attempt}"
        store = PrefixStore(occasion, self._store)
        rank, size = staying.index(self._rank), len(staying)
        rendezvous = GroupRendezvous(store, rank, size, self._timeout, named, self._name, occasion)
        group = type(self)(rendezvous, form_group(rendezvous, expected=expected))
        group.report_backend_as(self._backend)
        return group

    def get_reconfigure_handle(self) -> str:
        """Returns this rank's handle for `_reconfigure`. It is constant for the lifetime of the group object."""
        return str(self._handle)

    def reconfigure(self, opts: Any) -> TorchWork:
        """Replaces the ranks in the group with those that have the given handles. All of these ranks must call this.

        Pending calls on the former group fail on all of its ranks. If `reconfigure` fails, the group has no connections
        until a later `reconfigure` with a different `uuid` succeeds.

        Args:
            opts: Torch's `ReconfigureOptions`. `uuid` must be a number that has not been used before. `handles` is a
                list in the order of the new ranks, or a set, which is sorted by the processes' original ranks.

        Raises:
            ValueError: a handle is invalid, or this rank's handle is missing.
            RendezvousError: `uuid` was used before, the ranks were given different handles, or a rank did not arrive.
        """
        order = in_rank_order(opts.handles)
        if self._handle not in order:
            raise ValueError(
                f"rank {self._rank}: the handle of this process is not among the {len(order)} that _reconfigure was "
                "given; only processes whose handles are passed may call it"
            )
        if opts.hints:
            raise ValueError(f"the backend 'paceline' has no hints; got {', '.join(sorted(opts.hints))}")
        occasion = f"reconfigure/{opts.uuid}"
        rank, store = order.index(self._handle), PrefixStore(occasion, self._store)
        self._claim(store, opts.uuid, order)
        self._close(ClosedReason.NOT_MET)
        named = range(len(order)) if self._is_default() else [handle.rank for handle in order]
        rendezvous = GroupRendezvous(store, rank, len(order), self._timeout, named, self._name, occasion)
        members = [handle.member(number) for number, handle in enumerate(order)]
        self._adopt(rendezvous, form_group(rendezvous, opts.timeout, members))
        self._failure = OutcomeCode.OK
        self._abort_hooks.rearm()
        if self in _world.pg_group_ranks:
            _world.pg_group_ranks[self] = {name: number for number, name in enumerate(named)}
        if self._is_default():
            self._agree_on_names()
        return keep_alive(FinishedWork([]))

    def _agree_on_names(self) -> None:
        """Synchronizes torch's group counter, from which the names of later groups are derived.

        A process that replaces another process has created fewer groups than the other ranks.
        """
        count = torch.tensor([_world.group_count], device="cpu")
        self._group.all_reduce(count, ReduceOp.MAX)
        _world.group_count = int(count)

    def _claim(self, store: PrefixStore, uuid: int, order: Sequence[ReconfigureHandle]) -> None:
        """Checks that `uuid` is new and that all ranks were given the same handles in the same order."""
        me = f"rank {self._rank} ({self._handle.host}, pid {self._handle.pid})"
        if store.add(f"used by {self._handle.token}", 1) != 1:
            raise RendezvousError(f"{me}: _reconfigure's uuid {uuid} was already used; pass a new one each time")
        members = "; ".join(str(handle.member(rank)) for rank, handle in enumerate(order))
        mine = f"{members} [{' '.join(handle.token for handle in order)}]"
        first = store.compare_set("handles", "", mine).decode()
        if first != mine:
            raise RendezvousError(
                f"{me}: the ranks were given different handles for the uuid {uuid}: here {mine}, and on the first rank "
                f"to arrive {first}. Pass the same handles in the same order everywhere, with a new uuid"
            )

    def _note_failure(self) -> None:
        """Runs the abort hooks if the group is broken. Called after a call has failed."""
        world = vars(self).get("_world")
        if world is not None and world.group.failure() != OutcomeCode.OK:
            self._abort_hooks.run()

    def _is_default(self) -> bool:
        return torch_dist.group.WORLD is self

    def _adopt(self, rendezvous: GroupRendezvous, world: World) -> None:
        self._rank, self._size, self._named = rendezvous.rank, rendezvous.size, rendezvous.named
        self._members = world.group.members
        self._world = world
        # A program may exit without calling destroy_process_group. The other ranks must not treat that exit as a death.
        self._leaving = util.Finalize(self, world.close, exitpriority=0)
        self._group = world.group
        self.report_backend_as(self._backend)

    def _close(self, why: ClosedReason) -> None:
        """Closes the connections, if any. Thread-safe."""
        self._absence = why
        vars(self).pop("_group", None)
        world = vars(self).pop("_world", None)
        if world is not None:
            self._leaving.cancel()
            world.close()

    def absence_error(self) -> Exception:
        """Returns the error for a call on a group without connections."""
        me = f"rank {self._rank}: {self!r}"
        if self._absence is ClosedReason.ABORTED:
            return GroupAbortedError(
                f"{me} was aborted by this process; continue with shrink_group, _reconfigure or a new group",
                rank=self._named[self._rank],
            )
        if self._absence is ClosedReason.NOT_MET:
            return RendezvousError(
                f"{me} has no other ranks yet: it was created with enable_reconfigure=True, or its last _reconfigure "
                "failed. Pass torch.distributed._get_reconfigure_handle() of every rank to _reconfigure on all of them"
            )
        return ValueError(
            f"{me} was destroyed (destroy_process_group); create a new one with init_process_group or new_group"
        )


def _root(opts: Any) -> int:
    """Returns the root's group rank, given as an option object, a number, or None (torch's default, rank 0)."""
    return 0 if opts is None else int(getattr(opts, "rootRank", opts))


def _text(name: object) -> str:
    """Returns `name`, which must be a string, as with torch's own groups."""
    if not isinstance(name, str):
        raise TypeError(f"the name and the description of a group are strings, not {short_repr(name)}")
    return name


def prepend_gloo_message(
    error: CollectiveError, group_rank: int, ranks: Sequence[int], timeout: Timeout, wait_all_ranks: bool
) -> None:
    """Prepends the message that gloo would raise on this rank, if any, to the message of `error`.

    With gloo, the message on rank 0 lists the first missing rank or all missing ranks; other ranks refer to rank 0.
    `ranks` are ranks in the default group, as in `error`, and `timeout` is the timeout on rank 0.
    """
    if not isinstance(error, (CollectiveTimeoutError, PeerLostError)):
        return
    lost = error.missing if isinstance(error, CollectiveTimeoutError) else (error.rank,)
    absent = sorted(ranks.index(rank) for rank in lost if rank in ranks)
    waited_ms = int(to_seconds(timeout) * 1000)
    if group_rank:
        text = (
            f"Rank {group_rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            "from rank 0. Please check rank 0 logs for faulty rank."
        )
    elif wait_all_ranks and absent:
        text = f"[Rank 0]: Ranks {', '.join(map(str, absent))} failed to pass monitoredBarrier in {waited_ms} ms"
    elif waited_ms > 0 and absent:
        text = f"[Rank 0]: Rank {absent[0]} failed to pass monitoredBarrier in {waited_ms} ms"
    else:
        text = f"Rank 0 timed out in monitoredBarrier after {waited_ms} ms."
    error.args = (f"{text}\n Original exception: \n{error}", *error.args[1:])
