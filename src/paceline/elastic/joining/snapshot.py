"""A donor's snapshot for one learner: a fork of this process, and the log that it reads."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import warnings
from collections.abc import Sequence

from paceline.elastic.dealings import Dealt
from paceline.elastic.joining.log import append, new_log
from paceline.elastic.joining.serving import Progress, Served, be_child
from paceline.elastic.joining.wire import Contents, Item
from paceline.elastic.registry import Registry
from paceline.group.exchange import as_memory
from paceline.group.objects.serialization import encode
from paceline.security.doorkeeper import Listener

_LEAST_LOG_BYTES = 64 << 20
_STUCK_S = 10.0  # after which a learner that takes nothing is given up
_LOOK_S = 0.005


class Snapshot:
    """The state of this process as it is when this is made; closed, nothing of it is left.

    The child shares the state's memory until this process changes it, so the snapshot needs as much memory as is
    changed while it lasts, at most that of the state, and the log as much again: a learner that is slower than the
    training holds it up when the log is full.

    Args:
        number: the lesson's.
        registry: the state.
        round_number, committed, dealt: as in `Contents`.
        listener: where the learner connects; it is taken over.
        key: what the learner must hold.

    Raises:
        OSError: there are no processes, descriptors or memory.
        TypeError: the state cannot be sent.
    """

    def __init__(
        self,
        number: int,
        registry: Registry,
        round_number: int,
        committed: int,
        dealt: Dealt,
        listener: Listener,
        key: bytes,
    ) -> None:
        self._size = 0
        self._child = 0
        with contextlib.ExitStack() as undo:
            undo.callback(listener.close)
            encoded = encode(registry.capture(), "the state")
            memories = [as_memory(each) for each in encoded.buffers]
            sizes = tuple(map(len, memories))
            contents = Contents(round_number, committed, dealt, bytes(encoded.body), sizes)
            self._most = max(_LEAST_LOG_BYTES, sum(sizes))
            self._log = new_log()
            undo.callback(os.close, self._log)
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self._line.close)
            self._progress = Progress()
            served = Served(number, key, contents, memories, listener, self._log, theirs, self._progress)
            with theirs:
                self._fork(served)
            self._line.setblocking(False)
            undo.pop_all()
        listener.close()

    def _fork(self, served: Served) -> None:
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads; `serving.py` says why it may
            child = os.fork()
        if child == 0:
            be_child(served, parent)
        self._child = child

    @property
    def is_over(self) -> bool:
        """Whether the child has ended."""
        if self._child:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self._child, os.WNOHANG) == (0, 0):
                    return False
            self._child = 0
        return True

    def log(self, item: Item, tensors: Sequence[memoryview] = ()) -> None:
        """Appends to what the learner gets; gives the learner up if there is no memory."""
        try:
            self._size = append(self._log, item, tensors)
            self._line.send(b"+")
        except BlockingIOError:
            pass  # the child has not yet taken notice of what came before
        except OSError:
            self.close()

    def make_room(self) -> bool:
        """Waits until the learner has got the whole log, if that has become too long; returns whether it waited.

        A learner that does not come, or takes nothing, is given up.
        """
        if self._log < 0 or self._size - self._progress.done <= self._most:
            return False
        sent, since_s = self._progress.sent, time.monotonic()
        while self._progress.done < self._size and not self.is_over:
            if self._progress.sent != sent:
                sent, since_s = self._progress.sent, time.monotonic()
            elif sent == 0 or time.monotonic() - since_s > _STUCK_S:
                self.close()
                break
            time.sleep(_LOOK_S)
        return True

    def close(self) -> None:
        """Ends the child; idempotent."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._child, 0)
            self._child = 0
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
            self._line.close()
