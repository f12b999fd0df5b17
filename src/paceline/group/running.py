"""A group that is open: it runs collectives on the engine of their device, and reports why one failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch.autograd import profiler

from paceline import _core
from paceline.durations import Timeout, to_nanoseconds
from paceline.engine.api import OpenGroup
from paceline.engine.channel import Call, Channel, HeaderFields, Outcome, Pending
from paceline.engine.codes import ITEM_SIZES, WIRES
from paceline.engine.failures import GROUP_LOST, Code, Member, to_error
from paceline.engine.naming import describe_call
from paceline.errors import CollectiveError, CollectiveTimeoutError
from paceline.group.base import BaseGroup
from paceline.group.buffers import Buffers
from paceline.group.devices import Devices, Opener
from paceline.group.planning import Plan
from paceline.group.profiling import Recording
from paceline.group.work import Work
from paceline.group.writes import count_writes, counting_writes
from paceline.record import recorder
from paceline.schedule.steps import Operation


class RunningGroup(BaseGroup):
    """A group's ranks and its engines for each type of device, on which all collectives run.

    Args:
        opened: the group for CPU tensors.
        members: the ranks of the group with their hosts and processes, in the order of their group ranks.
        group_rank: this process's rank among them.
        timeout: how long calls wait for the other ranks.
        name: the group's name in messages.
        backend: what `get_backend` returns.
        openers: functions that open the group for other devices, by the device's type.
        advice: what errors advise about a tensor on a device without an opener; by default they name an engine.
        everybody: the members of the group's engine, not all of whom need be in the group; by default the group's.
        identity: the same on all members, for the recording; 0 if they share none.
    """

    def __init__(
        self,
        opened: OpenGroup,
        members: Sequence[Member],
        group_rank: int,
        timeout: Timeout,
        name: str,
        backend: str = "paceline",
        openers: Mapping[str, Opener] | None = None,
        advice: str = "",
        everybody: Sequence[Member] = (),
        identity: int = 0,
    ) -> None:
        self.ranks = [member.rank for member in members]
        self.name = name
        self.backend = backend
        self.profiled_as = "paceline"  # a profile's events are named `paceline:all_reduce` and so on
        recorder.begin()
        recorder.identify_once(self.ranks[group_rank], len(everybody or members))
        ranks = self.ranks

        def record(on_device: OpenGroup, device_type: str) -> int:
            serial = recorder.open_group(name, f"{backend} on {device_type}", identity, group_rank, ranks)
            on_device.record_as(serial)
            return serial

        self._devices = Devices(opened, openers or {}, backend, record, advice)
        self._channel = opened.channel
        self._members = list(members)
        self._everybody = everybody
        self._rank = group_rank
        self._closed = False
        self._closed_why = (
            "this process group was destroyed (destroy_process_group); "
            "make a new one with init_process_group or new_group"
        )
        self._abandoned: list[Buffers] = []
        self.set_timeout(timeout)

    def __repr__(self) -> str:
        return f"ProcessGroup({self.name or 'default'}, rank {self._rank} of {len(self.ranks)})"

    def rank(self) -> int:
        """Returns this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Returns the number of ranks in the group."""
        return len(self.ranks)

    @property
    def me(self) -> Member:
        """Returns this rank with its host and process, which messages show as "rank 3 (host, pid 4711)"."""
        return self._members[self._rank]

    @property
    def members(self) -> tuple[Member, ...]:
        """Returns the ranks with their hosts and processes, in the order of their group ranks."""
        return tuple(self._members)

    @property
    def device_types(self) -> frozenset[str]:
        """Returns the types of the devices whose tensors the group's calls take, such as "cpu" and "cuda"."""
        return self._devices.types

    @property
    def on_cpu(self) -> OpenGroup:
        """Returns the engine's group for CPU tensors."""
        return self._devices.of([], "")

    @property
    def timeout(self) -> timedelta:
        """Returns how long a call waits for the other ranks."""
        return timedelta(microseconds=self.timeout_ns / 1000)

    @property
    def is_closed(self) -> bool:
        """Returns whether this rank has ended the group."""
        return self._closed

    def set_timeout(self, timeout: Timeout) -> None:
        """Sets `timeout` for later calls."""
        self.timeout_ns = to_nanoseconds(timeout)

    def abort(self) -> None:
        """Ends every call of the group on all its ranks, now and later, with a `GroupAbortedError`.

        Any thread may call this while others wait in calls of the group; it does not wait for the other ranks. It is
        meant for a thread that learns that the group cannot go on, for instance because a rank has to be replaced.
        `close` must still follow. With the engines "gloo", "mpi" and "nccl" it ends calls of this rank only, and with
        the first two not before the call's time-out.
        """
        self._devices.abort()

    def failure(self) -> Code:
        """Returns why the group can no longer be used, as far as this rank knows without a call; OK while it can."""
        return Code(self._devices.failure())

    def close_because(self, why: str) -> None:
        """Ends the group for this rank; later calls fail with an error that says why."""
        self._closed_why = why
        self.close()

    def close(self) -> None:
        """Ends the group for this rank; idempotent."""
        self._closed = True
        self._devices.close()

    def _run(self, plan: Plan, async_op: bool | None) -> Work | None:
        """Makes a planned call on the engine of the device of its tensors.

        Args:
            plan: the call and its buffers.
            async_op: if None, the call waits as with False, and returns a finished `Work` as torch's methods do.
        """
        if self._closed:
            raise self.closed_error()
        call, buffers = plan
        recording = self.recording(str(call.operation), _shown(plan)) if profiler._is_profiler_enabled else None
        channel = self._channel_of(call, buffers)
        if async_op:
            work = self.work_of(channel.submit(call), plan)
            if recording is not None:
                recording.end_with(work)
            return work
        count_writes(self.written_by(plan))
        outcome = channel.run(call)
        if recording is not None:
            recording.end()
        if outcome is not None:
            raise self.abandon(outcome, plan)
        if buffers.finish is not None:
            buffers.finish()
        return Work(None, str(call.operation), buffers.kept, results=buffers.written) if async_op is None else None

    def prepare(self, plan: Plan) -> _core.PreparedCall | None:
        """Returns the planned call for being made many times; None if the engine gains nothing by that.

        The call reads and writes the buffers where they are now, and nothing is copied back.
        """
        if self._closed:
            raise self.closed_error()
        call, buffers = plan
        return self._channel_of(call, buffers).prepare(call)

    def recording(self, call: str, tensors: Sequence[torch.Tensor]) -> Recording:
        """Begins the event of a call in the profile that is being recorded."""
        return Recording(f"{self.profiled_as}:{call}", tensors)

    def _channel_of(self, call: Call, buffers: Buffers) -> Channel:
        channel = self._devices.of(buffers.kept, call.operation).channel
        if call.wire and not channel.quantises:
            raise ValueError(self._no_wire(WIRES[call.wire - 1]))
        return channel

    def _no_wire(self, wire: str) -> str:
        return (
            f"rank {self.me.rank}: wire={wire!r} needs CPU tensors and the engine 'paceline', also between the hosts; "
            f"this group's backend is {self.backend!r}. Leave wire out, or make the group with backend='paceline' and "
            "without between_hosts"
        )

    def work_of(self, pending: Pending, plan: Plan) -> Work:
        """Returns the `Work` of a planned call that has been submitted."""
        call, buffers = plan
        written = self.written_by(plan)
        count_writes(written)  # when it begins, and also when it ends: the program may have kept a tensor in between
        return Work(
            pending,
            str(call.operation),
            buffers.kept,
            counting_writes(written, buffers.finish),
            lambda outcome: self.abandon(outcome, plan),
            buffers.written,
        )

    def written_by(self, plan: Plan) -> Sequence[torch.Tensor]:
        """Returns the tensors that a call writes to."""
        call, buffers = plan
        return () if call.operation is Operation.BROADCAST and call.root == self._rank else buffers.written

    def limit_ns(self, timeout: Timeout | None) -> int:
        """Returns how long a call with this argument waits, in nanoseconds."""
        return self.timeout_ns if timeout is None else to_nanoseconds(timeout)

    def abandon(self, outcome: Outcome, plan: Plan) -> CollectiveError:
        """Returns the error of a call; keeps its buffers alive if a library may write to them after a time-out."""
        call, buffers = plan
        if outcome.code == Code.TIMED_OUT and not self._abandoned:
            self._abandoned.append(buffers)
        count = call.count
        if call.operation is Operation.ALL_TO_ALL:  # the ranks' numbers of elements differ
            count = sum(sum(pieces[1::2]) for pieces in call.inputs) // ITEM_SIZES[call.dtype]
        return self._error(outcome, (0, call.operation, call.dtype, call.reduce_op, call.root, count))

    def _error(self, outcome: Outcome, header: HeaderFields) -> CollectiveError:
        return self._failed(outcome, describe_call(header).rsplit(" as call", 1)[0])

    def _failed(self, outcome: Outcome, call: str, lost: str = GROUP_LOST) -> CollectiveError:
        error = to_error(outcome, self._members, self._rank, call, lost, self._everybody)
        if isinstance(error, CollectiveTimeoutError):
            # All ranks receive the same verdict, so on a rank that was late `outcome.missing` lists that rank too.
            error.missing = tuple(self.ranks[at] for at in outcome.missing if at != self._rank)
        return error

    def closed_error(self) -> ValueError:
        """Returns the error of a call that is made after the group's end."""
        return ValueError(f"rank {self.me.rank}: {self._closed_why}")


def _shown(plan: Plan) -> list[torch.Tensor]:
    """Returns the tensors that a profile shows: the inputs, or the tensors that the call changes in place."""
    call, buffers = plan
    return buffers.kept[: sum(len(flat) // 2 for flat in call.inputs)] or buffers.kept
