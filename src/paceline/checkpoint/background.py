"""The thread that writes a checkpoint while the training goes on, one at a time in a process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from paceline.checkpoint.staging import Staging
from paceline.elastic.joining.priority import be_modest


class SaveHandle:
    """A checkpoint that is being written.

    Args:
        work: writes it.
        name: of the checkpoint.
        beside: is called in another thread meanwhile, and waited for; it raises nothing.
    """

    def __init__(self, work: Callable[[], None], name: str, beside: Callable[[], None] | None = None) -> None:
        self.name = name
        self._work, self._beside = work, beside
        self._error: BaseException | None = None
        # It is no daemon, so that a process that ends finishes its last checkpoint.
        self._thread = threading.Thread(target=self._run, name="paceline-checkpoint")
        self._thread.start()

    def done(self) -> bool:
        """Returns whether the checkpoint has been written, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the checkpoint has been written, and returns whether it has.

        Args:
            timeout: the seconds to wait at most; without limit if None. The writing itself has the group's time-out.

        Raises:
            CheckpointError: a rank failed; raised on every rank, once.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _run(self) -> None:
        be_modest()
        finish_beside = self._start_beside()
        try:
            self._work()
        except BaseException as error:
            self._error = error
            sys.stderr.write(f"paceline: the checkpoint {self.name} was not saved: {error}\n")
        finally:
            finish_beside()
            del self._work, self._beside

    def _start_beside(self) -> Callable[[], None]:
        """Returns what waits for the work beside, or does it if there is no thread: other ranks wait for it."""
        if self._beside is None:
            return _nothing
        thread = threading.Thread(target=self._beside, name="paceline-copies")
        try:
            thread.start()
        except RuntimeError:
            return self._beside
        return thread.join


def _nothing() -> None:
    pass


class Background:
    """The checkpoint that this process is writing, and the memory for its copy."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._handle: SaveHandle | None = None

    def start(self, work: Callable[[], None], name: str, beside: Callable[[], None] | None = None) -> SaveHandle:
        """Has a thread do `work`, which writes the checkpoint of that name; see `SaveHandle`."""
        self._handle = SaveHandle(work, name, beside)
        return self._handle

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if there is one.

        Raises:
            CheckpointError: it could not be written, and nobody has been told yet.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()


BACKGROUND = Background()
