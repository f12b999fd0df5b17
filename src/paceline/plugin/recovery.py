"""What a torch.distributed program goes on with after a failure: abort, errors, `shrink_group` and `_reconfigure`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch._C import _distributed_c10d as torch_core
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import Work as TorchWork
from torch.distributed.distributed_c10d import _world

from paceline.engine.failures import Code
from paceline.errors import RendezvousError
from paceline.group.default import World
from paceline.group.eager import eager_methods
from paceline.group.reduce_op import ReduceOp
from paceline.plugin import shrinking
from paceline.plugin.abort_hooks import AbortHooks
from paceline.plugin.handles import Handle, in_rank_order
from paceline.plugin.identity import Absence, Identity
from paceline.plugin.meeting import Meeting, meet
from paceline.plugin.works import FinishedWork, kept

_ERRORS = {Code.OK: "SUCCESS", Code.TIMED_OUT: "TIMEOUT", Code.PEER_LOST: "REMOTE_ERROR"}
_ABORT = 1  # torch's SHRINK_ABORT


@eager_methods
class Recovery(Identity):
    """A group that can be aborted, and whose ranks can change."""

    supports_reconfigure = True
    supports_abort_hooks = True
    supports_shrinking = shrinking.is_possible()

    def __init__(self, meeting: Meeting, world: World | None) -> None:
        super().__init__(meeting, world)
        self._handle = Handle.mine(meeting.named[meeting.rank])
        self._abort_hooks = AbortHooks()
        self._failure = Code.OK  # of the latest group that was aborted

    def abort(self) -> None:
        """Ends the calls of all ranks, now and later, with a `GroupAbortedError`, and closes this rank's connections.

        Any thread may call this while others wait in calls of the group. The abort hooks run first.
        """
        world = vars(self).get("_world")
        if world is None:
            return
        self._abort_hooks.run()
        world.group.abort()
        self._failure = world.group.failure()
        self._close(Absence.ABORTED)

    def get_error(self) -> Any:
        """Returns what the group failed with as torch's `ErrorType`, as far as this rank knows without a call.

        SUCCESS: it can be used. TIMEOUT: a rank did not come. REMOTE_ERROR: one died or left. COMM_ERROR: one called
        `abort`, or the group failed otherwise.
        """
        world = vars(self).get("_world")
        code = self._failure if world is None else world.group.failure()
        return getattr(torch_core.ErrorType, _ERRORS.get(code, "COMM_ERROR"))

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Has `hook` run once before `abort` takes effect, or when a call finds that the group has failed."""
        self._abort_hooks.add(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Removes the hook that was registered with that number."""
        self._abort_hooks.remove(hook_id)

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None) -> Recovery:
        """Returns a new group of the other ranks, with consecutive ranks; each of them calls this.

        The excluded ranks are not needed, so they may be dead. The ranks meet over torch's store, whose server must
        live. This group stays as it is, unless `shrink_flags` says that it is to be aborted.

        Raises:
            RendezvousError: a rank that was not excluded did not come, or died.
        """
        if opts_override is not None:
            raise ValueError(f"the backend 'paceline' has no options; got {type(opts_override).__name__}")
        staying = [rank for rank in range(self._size) if rank not in ranks_to_exclude]
        shrinking.return_groups_themselves(type(self))
        expected = [self._members[rank] for rank in staying] if self._members else []
        if shrink_flags & _ABORT:
            self.abort()
        key = f"shrunk/{'.'.join(str(rank) for rank in sorted(ranks_to_exclude))}"
        attempt = self._store.add(f"{key}/{self._rank}", 1)
        named = range(len(staying)) if self._is_default() else [self._named[rank] for rank in staying]
        store = PrefixStore(f"{key}/{attempt}", self._store)
        meeting = Meeting(store, staying.index(self._rank), len(staying), self._timeout, named, self._name)
        group = type(self)(meeting, meet(meeting, expected=expected))
        group.stand_in_for(self._backend)
        return group

    def get_reconfigure_handle(self) -> str:
        """Returns what names this rank in `_reconfigure`; it stays the same for the life of the group object."""
        return str(self._handle)

    def reconfigure(self, opts: Any) -> TorchWork:
        """Replaces the group's ranks by those whose handles are given; each of them calls this, and nobody else has to.

        Calls of the former group fail, here and on its other ranks. If this fails, the group has no ranks until a call
        with another number succeeds.

        Args:
            opts: torch's `ReconfigureOptions`. `uuid` is a number that was not used before. `handles` are in the order
                of the new ranks; in a set, processes keep the order of the ranks that they started with.

        Raises:
            ValueError: the handles are not those of the ranks, or this rank's is not among them.
            RendezvousError: the number was used before, the ranks were given different handles, or one did not come.
        """
        order = in_rank_order(opts.handles)
        if self._handle not in order:
            raise ValueError(
                f"rank {self._rank}: the handle of this process is not among the {len(order)} that _reconfigure was "
                "given; only processes whose handles are there call it"
            )
        if opts.hints:
            raise ValueError(f"the backend 'paceline' has no hints; got {', '.join(sorted(opts.hints))}")
        rank, store = order.index(self._handle), PrefixStore(f"reconfigure/{opts.uuid}", self._store)
        self._claim(store, opts.uuid, order)
        self._close(Absence.NOT_MET)
        named = range(len(order)) if self._is_default() else [handle.rank for handle in order]
        meeting = Meeting(store, rank, len(order), self._timeout, named, self._name)
        self._adopt(meeting, meet(meeting, opts.timeout, [handle.member(at) for at, handle in enumerate(order)]))
        self._failure = Code.OK
        self._abort_hooks.rearm()
        if self in _world.pg_group_ranks:
            _world.pg_group_ranks[self] = {name: at for at, name in enumerate(named)}
        if self._is_default():
            self._agree_on_names()
        return kept(FinishedWork([]))

    def _agree_on_names(self) -> None:
        """Has all ranks give the same names to the groups that they make from now on.

        torch.distributed counts groups, and a process that takes the place of another one has made fewer than the rest.
        """
        count = torch.tensor([_world.group_count])
        self._group.all_reduce(count, ReduceOp.MAX)
        _world.group_count = int(count)

    def _claim(self, store: PrefixStore, uuid: int, order: Sequence[Handle]) -> None:
        """Makes sure that the number is new, and that all ranks were given the same handles in the same order."""
        me = f"rank {self._rank} ({self._handle.host}, pid {self._handle.pid})"
        if store.add(f"used by {self._handle.token}", 1) != 1:
            raise RendezvousError(f"{me}: _reconfigure's uuid {uuid} was already used; pass a new one each time")
        here = "; ".join(str(handle.member(rank)) for rank, handle in enumerate(order))
        mine = f"{here} [{' '.join(handle.token for handle in order)}]"
        first = store.compare_set("handles", "", mine).decode()
        if first != mine:
            raise RendezvousError(
                f"{me}: the ranks were given different handles for the uuid {uuid}: here {mine}, and on the rank that "
                f"came first {first}. Pass the same handles in the same order everywhere, with a uuid that is new"
            )

    def _note_failure(self) -> None:
        """Runs the abort hooks if the group is broken, which a call that failed has found."""
        world = vars(self).get("_world")
        if world is not None and world.group.failure() != Code.OK:
            self._abort_hooks.run()

    def _is_default(self) -> bool:
        return torch_dist.group.WORLD is self
