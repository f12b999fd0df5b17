"""The C++ core. Codes (operation, dtype, reduce op, status) are the enum values of `native/`."""

from collections.abc import Sequence

import torch

class Outcome:
    """Why a collective call failed."""

    code: int
    missing: list[int]
    gone: list[int]
    left: list[int]
    cause: int
    cause_left: bool
    reporter: int
    waited_ns: int
    split_from: int
    split_to: int
    split_sent: int
    split_expected: int
    step: int
    calls: list[tuple[int, int, int, int, int, int]]
    algorithms: list[int]

class Work:
    def done(self) -> bool: ...
    def wait(self, timeout_ns: int) -> bool: ...
    def outcome(self) -> Outcome | None: ...

def endings() -> int:
    """How many asynchronous calls of this process have ended, wrapped around at 2^32."""

def announce_ending() -> None:
    """Wakes who is in `await_ending`."""

def await_ending(seen: int, timeout_ns: int) -> None:
    """Sleeps, without the interpreter lock, while `endings` is `seen`; may return early."""

class Mesh:
    def __init__(self, rank: int, sockets: Sequence[int], names: Sequence[int] = ()) -> None: ...
    def lost(self) -> int: ...
    def close(self) -> None: ...

class HostGroup:
    @staticmethod
    def create(mesh: Mesh, members: Sequence[int], id: int, slot_bytes: int, timeout_s: float) -> HostGroup | None: ...
    def all_reduce(
        self, address: int, count: int, dtype: int, reduce_op: int, timeout_ns: int, /
    ) -> Outcome | None: ...
    def run(
        self,
        operation: int,
        dtype: int,
        reduce_op: int,
        root: int,
        count: int,
        timeout_ns: int,
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        /,
    ) -> Outcome | None: ...
    def submit(
        self,
        operation: int,
        dtype: int,
        reduce_op: int,
        root: int,
        count: int,
        timeout_ns: int,
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        /,
    ) -> Work: ...
    def close(self) -> None: ...

def shared_tensor(nbytes: int) -> torch.Tensor: ...
def simd_level() -> str: ...
def reduce(out: int, sources: Sequence[int], count: int, dtype: int, reduce_op: int, divisor: int) -> None: ...
def reduces(dtype: int, reduce_op: int, /) -> bool: ...

class StoreTable:
    def apply(self, op: int, number: int, fields: Sequence[bytes]) -> tuple[int, int, list[bytes]] | None: ...
    def missing(self, op: int, keys: Sequence[bytes]) -> list[bytes]: ...

class StoreServer:
    def adopt(self, fd: int) -> None: ...
    def close(self) -> None: ...

class StoreClient:
    def __init__(self, fd: int) -> None: ...
    def ask(
        self, op: int, number: int, fields: Sequence[bytes], timeout_s: float
    ) -> tuple[int, int, int, list[bytes]]: ...
    def close(self) -> None: ...

class Schedule:
    @staticmethod
    def make(algorithm: int, blocks: int, rank: int, size: int, steps: bytes) -> Schedule: ...

class Message:
    """A send or a receive that is under way."""

    def done(self) -> bool: ...
    def wait(self, timeout_ns: int) -> bool: ...
    def outcome(self) -> Outcome | None: ...
    def source(self) -> int: ...

class ScheduleGroup:
    @staticmethod
    def create(
        mesh: Mesh,
        id: int,
        rank: int,
        mesh_ranks: Sequence[int],
        sockets: Sequence[Sequence[int]],
        timeout_s: float,
        names: Sequence[int] = (),
    ) -> ScheduleGroup | None: ...
    def run(
        self,
        schedule: Schedule,
        operation: int,
        dtype: int,
        reduce_op: int,
        root: int,
        count: int,
        timeout_ns: int,
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        /,
    ) -> Outcome | None: ...
    def submit(
        self,
        schedule: Schedule,
        operation: int,
        dtype: int,
        reduce_op: int,
        root: int,
        count: int,
        timeout_ns: int,
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        /,
    ) -> Work: ...
    def send(
        self, peer: int, tag: int, dtype: int, tensor: Sequence[int], timeout_ns: int, background: bool, /
    ) -> Message: ...
    def receive(
        self, peer: int, tag: int, dtype: int, tensor: Sequence[int], timeout_ns: int, background: bool, /
    ) -> Message: ...
    def gone(self) -> list[int]: ...
    def close(self) -> None: ...

def time_reduction(nbytes: int) -> float: ...
