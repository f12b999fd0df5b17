"""A collective that runs, or ran, asynchronously."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from paceline import _core
from paceline.errors import CollectiveTimeoutError

_FOR_EVER_NS = 1 << 62


class Work:
    """What a collective with `async_op=True` returns. Its tensors must not be touched before `wait` has returned."""

    def __init__(
        self,
        work: _core.Work | _core.Message | None,
        name: str,
        tensors: Sequence[torch.Tensor] = (),
        finish: Callable[[], None] | None = None,
        to_error: Callable[[_core.Outcome], Exception] | None = None,
    ) -> None:
        self._work = work
        self._name = name
        self._tensors: Sequence[torch.Tensor] = tensors  # kept alive while the core reads and writes them
        self._finish = finish
        self._to_error = to_error
        self._error: Exception | None = None
        self._settled = work is None
        if self._settled and finish is not None:
            finish()

    def __del__(self) -> None:
        # The core still writes to the tensors that this object keeps alive.
        if not getattr(self, "_settled", True) and self._work is not None and not self._work.done():
            self._work.wait(_FOR_EVER_NS)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the tensors are ready; True.

        Args:
            timeout: give up waiting after this long; the call itself goes on and can be waited for again. Without one
                the call's own time-out applies.

        Raises:
            CollectiveTimeoutError: `timeout` was over, or the call's.
            PeerLostError, CollectiveMismatchError: as for the synchronous call.
        """
        if not self._settled:
            assert self._work is not None
            timeout_ns = _FOR_EVER_NS if timeout is None else int(timeout.total_seconds() * 1e9)
            if not self._work.wait(timeout_ns):
                raise CollectiveTimeoutError(
                    f"{self._name} was not done after the {timeout_ns / 1e9:.1f} s that wait() was given; "
                    "it goes on, wait for it again or with a longer timeout="
                )
            self._settle()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""
        if not self._settled and self._work is not None and self._work.done():
            self._settle()
        return self._settled

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Why it failed; None while it runs or when it went well."""
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors it wrote; waits for them."""
        self.wait()
        return list(self._tensors)

    def source_rank(self) -> int:
        """Of a receive that is over: the sender's group rank."""
        self.wait()
        return self._work.source() if isinstance(self._work, _core.Message) else -1

    def _settle(self) -> None:
        assert self._work is not None
        outcome = self._work.outcome()
        self._settled = True
        if outcome is not None and self._to_error is not None:
            self._error = self._to_error(outcome)
        elif self._finish is not None:
            self._finish()
