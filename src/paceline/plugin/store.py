"""Presents a store of torch.distributed as one of Paceline's."""

from __future__ import annotations

import time
from datetime import timedelta

from torch._C._distributed_c10d import Store as TorchStore

from paceline.store.base import Answer, Op, Status, Store

# torch's own `wait` prints a warning for each wait that ends by its time limit, and cannot be interrupted. The pauses
# between questions grow with the time waited, so that waits are a sixteenth longer and ask the server rarely.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SHARE_OF_WAIT = 0.001, 0.25, 1 / 16


class BorrowedStore(Store):
    """Paceline's view of `store`, with what the engine needs of it; it does not support last wills."""

    def __init__(self, store: TorchStore, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._store = store

    def __repr__(self) -> str:
        return f"torch.distributed's {type(self._store).__name__}"

    def _apply(self, op: Op, number: int, fields: list[bytes], timeout_s: float) -> Answer:
        names = [field.decode() for field in (fields[:1] if op is Op.SET else fields)]
        if op is Op.SET:
            self._store.set(names[0], fields[1].decode())
            return Status.OK, 0, []
        if op is Op.LAST_WILL:
            return Status.OK, 0, []
        if op is Op.CHECK:
            return Status.OK, int(self._store.check(names)), []
        if op not in (Op.GET, Op.WAIT, Op.MULTI_GET):
            return Status.REFUSED, 0, [b"the engine does not need it"]
        if not self._come(names, timeout_s) and (absent := [name for name in names if not self._store.check([name])]):
            return Status.TIMED_OUT, 0, [name.encode() for name in absent]
        return Status.OK, 0, [] if op is Op.WAIT else [self._store.get(name) for name in names]

    def _come(self, names: list[str], timeout_s: float) -> bool:
        """Waits until all keys exist; returns whether they did before the time was over."""
        began = time.monotonic()
        while not self._store.check(names):
            waited_s = time.monotonic() - began
            if waited_s >= timeout_s:
                return False
            pause_s = min(max(_FIRST_PAUSE_S, waited_s * _SHARE_OF_WAIT), _LONGEST_PAUSE_S)
            time.sleep(min(pause_s, timeout_s - waited_s))
        return True
