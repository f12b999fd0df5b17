"""Messages between two ranks over gloo, each with its type and length in front."""

from __future__ import annotations

import time

from torch.distributed import distributed_c10d as c10d

from paceline.engine.adapters.diagnosis import FailureDiagnosis
from paceline.engine.adapters.recording import GroupRecorder
from paceline.engine.adapters.serial_channel import CallTimeout, LibraryError
from paceline.engine.adapters.waited_message import Envelope, WaitedMessage
from paceline.engine.channel import Outcome, Pieces
from paceline.engine.gloo.wire import GlooTransfer


class GlooMessages:
    """Messages over gloo, each with its type and length in front."""

    def __init__(self, group: c10d.ProcessGroupGloo, diagnosis: FailureDiagnosis, rank: int) -> None:
        self._group = group
        self._diagnosis = diagnosis
        self._rank = rank
        self._recorder = GroupRecorder(diagnosis.members, rank)

    def record_messages_as(self, group: int, /) -> None:
        """Records the messages from now on as those of this group."""
        self._recorder.group = group

    def send(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> WaitedMessage:
        """To a group rank."""
        recorded = self._recorder.send(peer, tag, dtype, tensor)
        envelope = Envelope(dtype, tensor).fill()
        work = self._group.send([envelope.tensor], peer, tag + 1)

        def finish() -> tuple[int, Outcome | None]:
            return peer, self._wait(work, peer, timeout_ns)

        return WaitedMessage(finish, recorded, background)

    def receive(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> WaitedMessage:
        """From a group rank, or with -1 from any."""
        recorded = self._recorder.receive(peer, tag, dtype, tensor)
        envelope = Envelope(dtype, tensor)
        if peer < 0:
            work = self._group.recv_anysource([envelope.tensor], tag + 1)
        else:
            work = self._group.recv([envelope.tensor], peer, tag + 1)

        def finish() -> tuple[int, Outcome | None]:
            failure = self._wait(work, peer, timeout_ns)
            source = peer if failure is not None or peer >= 0 else work._source_rank()
            return source, failure or envelope.open(source, self._rank)

        return WaitedMessage(finish, recorded, background)

    def _wait(self, work: c10d.Work, peer: int, timeout_ns: int) -> Outcome | None:
        started_ns = time.monotonic_ns()
        try:
            GlooTransfer(work).wait(started_ns + timeout_ns)
            return None
        except (CallTimeout, LibraryError) as error:
            said = "" if isinstance(error, CallTimeout) else str(error)
            return self._diagnosis.about_message(peer, said, time.monotonic_ns() - started_ns)
