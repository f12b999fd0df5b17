"""Presents a store of torch.distributed as one of Paceline's."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store as TorchStore

from paceline.store.base import Answer, Op, Status, Store

_SHORTEST_S = 0.001  # torch's FileStore takes less for no limit


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
        try:
            self._store.wait(names, timedelta(seconds=max(timeout_s, _SHORTEST_S)))
        except RuntimeError:  # torch's stores raise different errors for this
            # What is there by now came between the time-out and this question.
            if absent := [name.encode() for name in names if not self._store.check([name])]:
                return Status.TIMED_OUT, 0, absent
        return Status.OK, 0, [] if op is Op.WAIT else [self._store.get(name) for name in names]
