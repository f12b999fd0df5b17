"""`StagedGroup`: a group for tensors on an accelerator that uses a group for CPU tensors of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from paceline.comm.engine.adapters.device_streams import with_index
from paceline.comm.engine.adapters.group_recorder import GroupRecorder
from paceline.comm.engine.api import OpenGroup
from paceline.comm.engine.failures import CallFailure, OutcomeCode, RankIdentity
from paceline.comm.engine.staged.channel import StagedChannel
from paceline.comm.engine.staged.messages import StagedMessages

_announced = False  # whether this process has printed how tensors travel


class StagedGroup:
    """A group on a device; see `engine.api.OpenGroup`.

    Args:
        inner: the group of the same ranks for CPU tensors, which this one closes.
        device: the device of the tensors.
        members: the members, by group rank.
        group_rank: the group rank of this process.
    """

    def __init__(
        self, inner: OpenGroup, device: torch.device, members: Sequence[RankIdentity], group_rank: int
    ) -> None:
        device = with_index(device)
        self.inner = inner
        self._recorder = GroupRecorder(members, group_rank)
        self.channel = StagedChannel(inner.channel, device, self._recorder, group_rank, len(members))
        self.messages = StagedMessages(inner.messages, device, self._recorder, group_rank)

    def record_as(self, group: int) -> None:
        """Records calls and messages, but not those of chunks; see `engine.channel.EngineChannel`."""
        self._recorder.group = group

    def abort(self) -> None:
        """Ends calls and messages, on all ranks if the inner group does so."""
        self.channel.abort()
        self.inner.abort()
        self.messages.close(CallFailure(OutcomeCode.ABORTED))

    def failure(self) -> int:
        """Returns the code of a failure of calls or messages, or OK."""
        return self.channel.failure() or self.inner.failure()

    def close(self) -> None:
        """Closes the group; idempotent. Copies that are enqueued are completed first."""
        self.inner.close()
        self.channel.close()
        self.messages.close(CallFailure(OutcomeCode.INTERRUPTED))


def announce_once(device: torch.device, backend: str, rank: int) -> None:
    """Prints, once a process and on rank 0, that tensors on the device travel through host memory."""
    global _announced
    if _announced or rank != 0:
        return
    _announced = True
    faster = "; backend='nccl' is faster where NCCL works" if device.type == "cuda" else ""
    sys.stderr.write(
        f"paceline: with the backend {backend!r}, tensors on {device} travel through host memory{faster}\n"
    )
