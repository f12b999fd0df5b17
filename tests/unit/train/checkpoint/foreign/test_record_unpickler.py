"""An untrusted pickle can neither change the process that reads it nor keep that process busy."""

from __future__ import annotations

import builtins
import collections
import inspect
import os
import pathlib
import pickle
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint.metadata as torchs
from hypothesis import example, given
from hypothesis import strategies as st

import paceline
from paceline.cli.main import main
from paceline.errors import CheckpointError
from paceline.train.checkpoint.foreign import dcp, record_unpickler
from paceline.train.checkpoint.foreign.dcp import read_metadata

METADATA = "torch.distributed.checkpoint.metadata"

NAMES = [
    (METADATA, "Metadata"), (METADATA, "TensorStorageMetadata"), (METADATA, "BytesStorageMetadata"),
    (METADATA, "ChunkStorageMetadata"), (METADATA, "TensorProperties"), (METADATA, "MetadataIndex"),
    (METADATA, "StorageMeta"), (METADATA, "_MEM_FORMAT_ENCODING"), ("torch", "Size"), ("torch", "float32"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"), ("builtins", "getattr"), ("builtins", "set"), ("pathlib", "PurePosixPath"),
    ("pathlib", "PosixPath"), ("pathlib", "Path"),
]  # fmt: skip

WATCHED = [builtins, collections, os, pathlib, pickle, struct, torch.serialization, torchs, dcp]


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def global_of(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def slot_state(name: str, value: bytes) -> bytes:
    """Returns a BUILD opcode with which Python's unpickler sets an attribute of any object on the stack."""
    return b"N}" + text(name) + value + b"s\x86b"


def attributes_of(owner: object) -> Iterator[tuple[str, int]]:
    """Yields the attributes of a class or function, including its defaults and code."""
    for name, value in sorted(getattr(owner, "__dict__", {}).items()):
        yield name, id(value)
    if inspect.isfunction(owner):
        yield from ((name, id(getattr(owner, name))) for name in ("__defaults__", "__kwdefaults__", "__code__"))


def seen() -> dict[str, object]:
    """Returns the contents of modules, and the attributes of their classes and functions."""
    found: dict[str, object] = {}
    for module in (*WATCHED, record_unpickler):
        for name, value in list(vars(module).items()):
            found[f"{module.__name__}.{name}"] = id(value)
            if inspect.isclass(value) or inspect.isfunction(value):
                found[f"{module.__name__}.{name}.*"] = list(attributes_of(value))
    return found


POISON = (
    b"\x80\x02"
    + global_of("builtins", "getattr")
    + slot_state("__defaults__", text("/chosen") + b"\x85")
    + b"0"
    + global_of("pathlib", "PurePosixPath")
    + slot_state("__fspath__", global_of("builtins", "getattr"))
    + b"N."
)

attributes = st.sampled_from(["__fspath__", "__defaults__", "__init__", "__hash__", "__setstate__", "args", "fqn"])

values = st.one_of(
    st.just(b"N"), st.just(b"\x88"), st.just(b"K\x07"), st.just(b")"), st.just(b"]"), st.just(b"}"), st.just(b"\x8f"),
    st.sampled_from(NAMES).map(lambda name: global_of(*name)), attributes.map(text),
    st.integers(0, 3).map(lambda index: bytes([ord("h"), index])),
)  # fmt: skip

operations = st.one_of(
    values,
    st.sampled_from([b"(", b"t", b"\x85", b"\x86", b"\x87", b"R", b"\x81", b"b", b"a", b"e", b"s", b"u", b"\x90"]),
    st.sampled_from([b"\x94", b"q\x00", b"q\x01", b"0", b"1", b"2", b"\x92", b"o", b"i", b"d", b"l", b"\x93", b"P"]),
    st.builds(slot_state, attributes, values),
    st.builds(lambda name, value: b"}" + text(name) + value + b"sb", attributes, values),
    st.binary(min_size=1, max_size=3),
)


@given(st.lists(operations, max_size=30).map(lambda parts: b"\x80\x04" + b"".join(parts) + b"."))
@example(POISON)
def test_no_operation_changes_a_module_class_or_function(data):
    before = seen()
    with pytest.raises(CheckpointError, match=r"x was not read|x cannot be read"):
        read_metadata(data, "x")
    assert seen() == before


@pytest.mark.parametrize("name", NAMES)
def test_no_known_name_takes_attributes(tmp_path, name):
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + global_of(*name) + slot_state("__fspath__", b"N") + b".")
    with pytest.raises(CheckpointError, match=r"gives a state to something other than a new record"):
        paceline.load({"model": torch.nn.Linear(1, 1)}, tmp_path)


@pytest.mark.parametrize("words", [["inspect"], ["verify"], ["diff", "."]])
def test_no_command_lets_a_pickle_change_it(tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    Path(".metadata").write_bytes(POISON)
    before = seen()
    assert main(["checkpoint", words[0], str(tmp_path), *words[1:]]) == 2
    assert seen() == before and os.fspath(tmp_path) == str(tmp_path)
    assert words[0] == "verify" or "was not read" in capsys.readouterr().err


def nested_tuple(depth: int) -> bytes:
    return b"\x80\x04})" + b"\x85" * depth + b"Ns."


def doubled_tuple(depth: int) -> bytes:
    return b"\x80\x04})\x940" + b"(h\x00h\x00tq\x000" * depth + b"h\x00Ns."


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(nested_tuple(200_000), id="a key nested 200,000 deep"),
        pytest.param(doubled_tuple(200), id="a key of 2^200 elements"),
        pytest.param(b"\x80\x04Nr" + struct.pack("<I", 2**32 - 1) + b".", id="a memo index of 2^32"),
        pytest.param(b"\x80\x04\x8e" + struct.pack("<Q", 2**63) + b".", id="bytes of 2^63"),
        pytest.param(b"\x80\x04\x8b" + struct.pack("<I", 2**31) + b"\xff" * 64 + b".", id="a number of 2^31 bytes"),
        pytest.param(b"\x80\x04]\x94" + b"h\x00a" * 1000 + b".", id="a list within itself"),
    ],
)
def test_a_pickle_that_would_take_all_memory_or_time_is_refused(data):
    limits = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"x was not read|x cannot be read"):
            read_metadata(data, "x")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
