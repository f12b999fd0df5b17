"""The core rejects invalid arguments, and never terminates the process because of them.

The core trusts the addresses of tensors, because only Paceline passes them, so the tests pass the address of a tensor
that is long enough. A seed determines all other arguments of each function and method in the core's stub: codes,
numbers of ranks and elements, lists, descriptors, objects, and values of unrelated types.
"""

from __future__ import annotations

import ast
import os
import random
import socket
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import NUMBERS, Journal, last_line, shown
from sampling import examples
from world import RankFailed

import paceline
from paceline import _core
from paceline.comm.engine.channel import CollectiveCall

CALLS = 1500
ROOM = 1 << 20  # number of bytes at each address
COUNTS = [0, 1, 7, 1000]
CODES = [-(2**31), -1, 0, 1, 2, 3, 4, 5, 6, 8, 9, 11, 12, 20, 21, 31, 32, 63, 64, 255, 256, 267, 2**31 - 1]
SOON_NS = [-(2**63), -1, 0, 1, 1_000_000]
SOON_S = [-1e300, -1.0, float("nan"), 0.0, 0.001]
SIZES = [-1, 0, 1, 3, 4096, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64]
ADDRESSES = {"address", "out", "averages", "packed", "residual"}
NOTHING: list[object] = [None, "", b"", 1.5, object(), [], [None], {}, torch.ones(3)]
NEVER = {"read_tensors"}  # called by `import paceline`; changes how this process reads tensors


class Values:
    """Chooses a value for a parameter based on its name and its type in the stub."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._memory = torch.zeros(ROOM, dtype=torch.uint8)
        self.address = self._memory.data_ptr()
        self._mesh = _core.HostMesh.join(0, 1)
        self._silent = [socket.socketpair() for _ in range(2)]
        self.objects = self._objects()

    def _objects(self) -> dict[str, list[Any]]:
        mesh, call = self._mesh, self._right_call()
        host = _core.HostGroup.create(mesh, [0], 1, 4096, 5.0, 1)
        ends = [ours.detach() for ours, _ in self._silent]
        pair = _core.ScheduleGroup.create(mesh, 2, 0, [0, -1], [[], ends], 5.0)
        assert host is not None
        assert pair is not None
        copy = struct.pack("9i", 3, 0, -1, 1, 0, 1, 0, 0, 1)
        schedule = _core.Schedule.make(1, 1, 0, 2, copy)
        numbers = (self.address, self.address, self.address, self.address, 64, 0)
        return {
            "HostMesh": [mesh],
            "HostGroup": [host],
            "ScheduleGroup": [pair],
            "Schedule": [schedule],
            "PreparedCall": [host.prepare(call)],
            "Work": [host.submit(call)],
            "Message": [pair.receive(1, 0, 11, [self.address, 64], 1, False)],
            "Update": [_core.Update(11, [numbers])],
            "UpdateOptions": [
                _core.sgd_options(
                    lr=0.1, weight_decay=0.0, maximize=False, momentum=0.0, dampening=0.0, nesterov=False
                ),
                _core.adam_options(
                    lr=0.1, weight_decay=0, maximize=False, beta1=0.9, beta2=0.9, eps=0.1, is_decoupled=True
                ),
            ],
            "StoreTable": [_core.StoreTable()],
            "SharedMemory": [_core.share_memory(mesh, 4096)[0]],
            "FastPathCall": [_core.FastPathCall()],
            "RecordedCall": [_core.RecordedCall(1, 1, 1, 1, 1, 1, 1, False, 1)],
        }

    def _right_call(self) -> CollectiveCall:
        return CollectiveCall(1, 11, 0, -1, 16, 1_000_000, [], [[self.address, 64]])

    def of(self, name: str, annotation: str) -> object:
        choose = self.random.choice
        is_address = name in ADDRESSES or (name, annotation) == ("tensor", "int")
        if self.random.random() < 0.05:
            return choose(NOTHING if is_address or name.startswith("timeout") else [*NOTHING, *NUMBERS])
        if annotation == "Call":
            return self._call()
        if annotation in self.objects:
            return choose(self.objects[annotation])
        if is_address:
            return self.address
        if name in ("sources", "ranges", "tensor") or (name in ("inputs", "outputs") and "int" in annotation):
            ranges = [self.address if at % 2 == 0 else choose(COUNTS) for at in range(2 * self.random.randrange(3))]
            return [self.address] * self.random.randrange(4) if name != "tensor" and name != "ranges" else ranges
        if name == "runs":
            return [(*[choose([0, self.address]) for _ in range(4)], choose([0, 4, 64, 7]), choose([0, 1, 2**63]))]
        if name in ("timeout_ns", "timeout_s"):
            return choose(SOON_NS if name == "timeout_ns" else SOON_S)
        if name in ("fd", "directory", "socket", "connection"):
            return self._descriptor()
        if name == "connections":
            return [[self._descriptor() for _ in range(self.random.randrange(3))] for _ in range(choose([0, 1, 2]))]
        if name in ("dtype", "operation", "op", "reduce_op", "wire", "algorithm", "kind", "outcome"):
            return choose(CODES)
        if name == "count":
            return choose(COUNTS)
        if name in ("nbytes", "max_bytes", "offset"):
            return choose(SIZES)
        if name == "steps":
            return b"".join(
                struct.pack("i", choose([-1, 0, 0, 1, 1, 2, 3, 6, 7, 2**20])) for _ in range(choose([9, 18]))
            )
        return self._of_type(annotation)

    def _of_type(self, annotation: str) -> object:
        choose = self.random.choice
        if annotation.startswith("Sequence["):
            inner = annotation.removeprefix("Sequence[").removesuffix("]")
            return [self._of_type(inner) for _ in range(self.random.randrange(4))]
        if annotation in self.objects:
            return choose([*self.objects[annotation], None])
        if annotation == "bytes":
            doubles = [0.0, 1.0, 2.0, -1.0, 1e300, float("nan"), float("inf"), 2.0**63]
            return choose([b"", b"x", b"\0" * 32, struct.pack(f"{8}d", *(choose(doubles) for _ in range(8)))])
        simple: dict[str, list[object]] = {
            "int": [*NUMBERS],
            "float": [0.0, -1.0, 1e300, float("nan"), float("inf")],
            "bool": [True, False],
            "str": ["", "x", "\0", "x" * 5000, "avx2", "baseline"],
        }
        return choose(simple.get(annotation, [None, object(), [], {}, ()]))

    def _descriptor(self) -> int:
        """Returns a descriptor that the core may take over, or an invalid one."""
        way = self.random.randrange(4)
        if way == 0:
            return self.random.choice([-1, -(2**31), 2**31 - 1, 10**6])
        if way == 1:
            return os.open("/dev/null", os.O_RDWR)
        if way == 2:
            short = os.memfd_create("short")
            os.write(short, b"x" * 100)
            return short
        return socket.socketpair()[0].detach()

    def _call(self) -> object:
        choose = self.random.choice
        fields: list[Any] = list(self._right_call())
        for _ in range(choose([0, 1, 1, 2])):
            at = self.random.randrange(len(fields))
            pieces = [[self.address, choose(COUNTS)] for _ in range(self.random.randrange(4))]
            fields[at] = choose(
                {
                    3: [-1, 0, 1, 2, 2**31 - 1],
                    4: [*COUNTS, 2**62, 2**63, 2**64 - 1],
                    5: SOON_NS,
                    6: [[], pieces, pieces[:1], [[self.address]], None],
                    7: [[], pieces, pieces[:1], [[self.address, 2**63, self.address, 2**63]], None],
                    9: [[], [self.address], [self.address, 64], [self.address, 2**63]],
                    10: [None, *self.objects["Update"], 1],
                }.get(at, CODES)
            )
        return tuple(fields) if self.random.random() < 0.95 else tuple(fields[:-1])


Parameters = list[tuple[str, str]]


def surface() -> list[tuple[str, str | None, Parameters]]:
    """Returns each function and method of the stub: name, class, and names and types of parameters."""
    stub = ast.parse(Path(_core.__file__).with_name("_core.pyi").read_text())
    found: list[tuple[str, str | None, Parameters]] = []

    def take(function: ast.FunctionDef, owner: str | None) -> None:
        given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        parameters = [(each.arg, ast.unparse(each.annotation)) for each in given if each.annotation is not None]
        found.append((function.name, owner, parameters))

    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            take(node, None)
        if isinstance(node, ast.ClassDef) and hasattr(_core, node.name):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    take(inner, node.name)
    return [each for each in found if each[0] not in NEVER]


def target(name: str, owner: str | None, values: Values) -> Callable[..., object]:
    if owner is None:
        return getattr(_core, name)
    kind = getattr(_core, owner)
    if name == "__init__":
        return kind
    if owner in values.objects and not isinstance(vars(kind).get(name), staticmethod):
        return getattr(values.random.choice(values.objects[owner]), name)
    return getattr(kind, name)


def call_the_core(directory: str, seed: int) -> int:
    warnings.simplefilter("ignore")
    journal, values, functions = Journal(f"{directory}/calls"), Values(seed), surface()
    returned = 0
    for number in range(CALLS):
        name, owner, parameters = values.random.choice(functions)
        if name in ("close", "abort") and number % 20:  # a closed object cannot be used again
            continue
        arguments = [values.of(*each) for each in parameters]
        if values.random.random() < 0.03:
            arguments = arguments[:-1]
        keywords = dict(zip([each for each, _ in parameters], arguments, strict=False)) if "options" in name else {}
        journal.note(f"{owner or '_core'}.{name}({', '.join(map(shown, arguments))})")
        try:
            made = target(name, owner, values)(*(() if keywords else arguments), **keywords)
        except Exception as error:  # regardless of the error, the process must survive
            journal.note(f"    {type(error).__name__}: {error}"[:300])
            continue
        returned += 1
        kept = values.objects.get(type(made).__name__)
        if kept is not None and len(kept) < 8:
            kept.append(made)
    assert torch.equal(torch.ones(3) + 1, torch.full((3,), 2.0))
    return returned


@pytest.mark.timeout(150)
@pytest.mark.parametrize("seed", range(examples(4)))
def test_no_argument_of_the_core_ends_the_process(ranks, tmp_path, seed):
    try:
        (returned,) = ranks(1)(call_the_core, str(tmp_path), seed, timeout_s=100)
    except RankFailed as failure:
        pytest.fail(f"{failure}\nThe last call: {last_line(str(tmp_path / 'calls'))}")
    assert returned > CALLS / 20, "hardly any call was made; the arguments are no longer those of the core"


def test_every_function_of_the_core_is_in_the_stub():
    named = {name if owner is None else owner for name, owner, _ in surface()} | NEVER
    named |= {node.name for node in ast.parse(_stub()).body if isinstance(node, ast.ClassDef)}
    assert {name for name in dir(_core) if not name.startswith("_") and callable(getattr(_core, name))} <= named


def _stub() -> str:
    return Path(paceline.__file__).with_name("_core.pyi").read_text()
