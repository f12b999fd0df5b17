"""Sends and receives of lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch.autograd import profiler

from paceline import _core
from paceline.durations import Timeout
from paceline.engine.codes import dtype_name
from paceline.engine.failures import GROUP_LOST, MESSAGES_LOST, Member
from paceline.group.arguments import checked_tag, require_peer
from paceline.group.buffers import Buffers, Tensors, as_list, count_elements, dtype_code
from paceline.group.running import RunningGroup
from paceline.group.work import Work
from paceline.group.writes import count_writes, counting_writes

ANY_SOURCE = -1


class MessagingGroup(RunningGroup):
    """A group with messages between two of its ranks."""

    def send(
        self, tensors: Tensors, dst: int, tag: int = 0, async_op: bool = True, timeout: Timeout | None = None
    ) -> Work | None:
        """Sends `tensors` to group rank `dst`, whose `recv` of the same tag, type and number of elements takes them."""
        work = self._pass("send", as_list(tensors, "send"), dst, tag, async_op, timeout)
        return work if async_op else None

    def recv(
        self,
        tensors: Tensors,
        src: int = ANY_SOURCE,
        tag: int = 0,
        async_op: bool = True,
        timeout: Timeout | None = None,
    ) -> Work:
        """Receives into `tensors` what group rank `src`, or with -1 any rank, sends with the same tag.

        The work's `source_rank()` is the sender's group rank.
        """
        return self._pass("recv", as_list(tensors, "recv"), src, tag, async_op, timeout)

    def _pass(
        self,
        name: Literal["send", "recv"],
        tensors: list[torch.Tensor],
        peer: int,
        tag: int,
        background: bool,
        timeout: Timeout | None,
    ) -> Work:
        """Starts a message, and without `background` waits for it."""
        if self._closed:
            raise self.closed_error()
        if name == "send" or peer != ANY_SOURCE:
            require_peer(self, peer, name, "dst" if name == "send" else "src")
        checked_tag(tag, name)
        code = dtype_code(tensors, name)
        buffers = Buffers()
        pieces = buffers.read(tensors) if name == "send" else buffers.write(tensors)
        shown = "recvAnySource" if peer < 0 else name
        recording = self.recording(shown, tensors) if profiler._is_profiler_enabled else None
        opened = self._devices.of(tensors, name)
        messages = opened.messages
        lost = MESSAGES_LOST if isinstance(opened.channel, _core.HostGroup) else GROUP_LOST
        start = messages.send if name == "send" else messages.receive
        count_writes(buffers.written)
        message = start(peer, tag, code, pieces, self.limit_ns(timeout), background)
        other_end = _other_end(self._members, name, peer)
        call = f"{name}({dtype_name(code)}, {count_elements(tensors)} elements, {other_end}, tag {tag})"

        work = Work(
            message,
            name,
            buffers.kept,
            counting_writes(buffers.written, buffers.finish),
            lambda outcome: self._failed(outcome, call, lost),
            results=tensors,
        )
        if background:
            if recording is not None:
                recording.end_with(work)
            return work
        try:
            work.wait()
        finally:
            if recording is not None:
                recording.end()
        return work


def _other_end(members: Sequence[Member], name: str, peer: int) -> str:
    if peer < 0:
        return "from any rank"
    return f"{'to' if name == 'send' else 'from'} rank {members[peer].rank}"
