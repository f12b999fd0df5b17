"""Malicious checkpoints: numbers and names in files are validated, and only regular files are opened."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import signal
import socket
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from torch import nn

import paceline as dist
from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.foreign.foreign_file import open_foreign, state_of
from paceline.train.checkpoint.format.manifest import digest_of
from paceline.train.checkpoint.format.root import Root, latest_name

STEP = "step_0000000001"
FILE = "rank_00000_000.safetensors"
_LIMIT_S = 60.0


@contextlib.contextmanager
def deadline() -> Iterator[None]:
    """Interrupts a process that waits for the other end of a pipe."""

    def fail(*_: object) -> None:
        raise AssertionError("the call was still waiting")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def state(seed: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    return {"model": model, "values": [1, {"list": [torch.full((2,), 5.0)]}], "empty": torch.empty(0, 2)}


def plain(loaded: dict[str, Any]) -> Any:
    tensors = {name: each.tolist() for name, each in loaded["model"].state_dict().items()}
    return tensors, loaded["values"][0], loaded["values"][1]["list"][0].tolist(), loaded["empty"].shape


def write_manifest(directory: Path, found: dict[str, Any]) -> None:
    """Writes a manifest with a correct digest, even if its contents are invalid."""
    members = [f" {json.dumps(key)}: {json.dumps(each)}" for key, each in found.items() if key != "digest"]
    text = ("{\n" + ",\n".join(members)).encode()
    (directory / "manifest.json").write_bytes(text + f',\n "digest": "{digest_of(text)}"\n}}\n'.encode())


def altered(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads((root / STEP / "manifest.json").read_bytes())
    change(found)
    write_manifest(root / STEP, found)


def first_piece(found: dict[str, Any], name: str = "model/0.weight") -> dict[str, Any]:
    piece: dict[str, Any] = found["tensors"][name]["pieces"][0]
    return piece


def rename_file(found: dict[str, Any], name: str) -> None:
    found["files"][name] = found["files"].pop(FILE)
    for entry in found["tensors"].values():
        for piece in entry["pieces"]:
            piece["file"] = name


def share_bytes(found: dict[str, Any]) -> None:
    one, other = first_piece(found), first_piece(found, "model/0.bias")
    other["at"] = one["at"]


def grow(found: dict[str, Any]) -> None:
    found["tensors"]["values/1/list/0"]["shape"] = [1 << 40]
    first_piece(found, "values/1/list/0")["flat"] = [0, 1 << 40]


def set_in(*path: Any) -> Callable[[dict[str, Any]], None]:
    *keys, last, value = path

    def change(found: Any) -> None:
        for key in keys:
            found = found[key]
        found[last] = value

    return change


HOSTILE_MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a file above": (lambda found: rename_file(found, f"../{FILE}"), "is not the name of a file"),
    "an absolute file": (lambda found: rename_file(found, f"/tmp/{FILE}"), "is not the name of a file"),
    "a file below": (lambda found: rename_file(found, f"a/{FILE}"), "is not the name of a file"),
    "the directory": (lambda found: rename_file(found, ".."), "is not the name of a file"),
    "the manifest": (lambda found: rename_file(found, "manifest.json"), "is not the name of a file"),
    "a name with a NUL": (lambda found: rename_file(found, "a\0b"), "is not the name of a file"),
    "no name": (lambda found: rename_file(found, ""), "is not the name of a file"),
    "an unlisted file": (lambda found: first_piece(found).update(file="other"), "in other, which is not listed"),
    "the header": (lambda found: first_piece(found).update(at=0), "have the same bytes of"),
    "bytes before the file": (lambda found: first_piece(found).update(at=-8), "the bytes -8 to 16 of"),
    "bytes after the file": (lambda found: first_piece(found).update(at=1 << 40), r"the bytes 1099511627776 to"),
    "another's bytes": (share_bytes, "have the same bytes of"),
    "too many elements": (lambda found: first_piece(found).update(flat=[0, 7]), "elements 0 to 7 of a tensor of 6"),
    "negative elements": (lambda found: first_piece(found).update(flat=[-1, 5]), "elements -1 to 5 of"),
    "a negative shape": (set_in("tensors", "model/0.weight", "shape", [-2, -3]), "is invalid"),
    "a huge shape": (set_in("tensors", "model/0.weight", "shape", [1 << 61, 1 << 61]), "is invalid"),
    "a large tensor": (grow, "the bytes .* of .* are listed, but it has"),
    "a type of another size": (set_in("tensors", "model/0.weight", "dtype", "F64"), "digests|same bytes|named"),
    "an unknown type": (set_in("tensors", "model/0.weight", "dtype", "X9"), "the type X9 is unknown"),
    "no digests": (lambda found: first_piece(found).update(digests=[]), "a piece of 24 bytes has 0 digests"),
    "blocks of nothing": (set_in("block_nbytes", 0), "is invalid"),
    "negative blocks": (set_in("block_nbytes", -5), "is invalid"),
    "a negative header": (set_in("files", FILE, "header_nbytes", -1), "bytes, -1 of them as its header"),
    "a header beyond the file": (set_in("files", FILE, "header_nbytes", 1 << 30), "of them as its header"),
    "a negative file": (set_in("files", FILE, "nbytes", -1), "has -1 bytes"),
    "a sequence without end": (set_in("sequence", (1 << 64) - 1), "its sequence is"),
    "a date out of time": (set_in("written_at_s", 1e300), "is invalid"),
    "no ranks": (set_in("world_size", 0), "is invalid"),
    "too many dimensions": (set_in("tensors", "model/0.weight", "shape", [1 << 62] * 60_000), "59992 more. is invalid"),
    "a dimension beyond 2^63": (set_in("tensors", "model/0.weight", "shape", [0, 1 << 63]), "is invalid"),
    "blocks of an exabyte": (set_in("block_nbytes", 1 << 60), "is invalid"),
    "a header of a terabyte": (set_in("files", FILE, {"nbytes": 1 << 42, "header_nbytes": 1 << 40, "header": ""}),
                               "of them as its header"),
    "a value without its tensor": (set_in("values", "values", {"$tensor": "x"}), "the tensor x, which is not listed"),
    "unlisted here": (set_in("here", ["../x"]), "is listed as local, but is not among the files"),
    "deep values": (set_in("values", "deep", "DEEP"), "is not a manifest of Paceline"),
}  # fmt: skip


@pytest.mark.parametrize("which", HOSTILE_MANIFESTS)
def test_manifests_that_mislead_are_refused(tmp_path: Path, which: str) -> None:
    change, said = HOSTILE_MANIFESTS[which]
    dist.save(state(), tmp_path, step=1)
    altered(tmp_path, change)
    if which == "deep values":
        text = (tmp_path / STEP / "manifest.json").read_bytes().replace(b'"DEEP"', b"[" * 100_000 + b"]" * 100_000)
        text = text.rpartition(b',\n "digest')[0]
        (tmp_path / STEP / "manifest.json").write_bytes(text + f',\n "digest": "{digest_of(text)}"\n}}\n'.encode())
    into = state(2)
    before = plain(into)
    for path in (tmp_path / STEP, tmp_path):
        with pytest.raises(CheckpointError, match=said):
            dist.load(into, path)
    assert plain(into) == before
    dist.save(state(), tmp_path, step=2)  # existing files do not prevent other saves
    dist.load(into, tmp_path)
    assert plain(into) == plain(state())


def other_kinds(path: Path, kind: str) -> None:
    """Replaces a file with one of a different kind."""
    data = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (path.parent.parent / "elsewhere").write_bytes(data)
        path.symlink_to("../elsewhere")
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        directory = os.open(path.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"/proc/self/fd/{directory}/{path.name}")  # an address is limited to 107 bytes
        os.close(directory)


KINDS = {
    "pipe": "a named pipe",
    "link": "a symbolic link",
    "device": "a symbolic link",
    "directory": "a directory",
    "socket": "a socket",
}


@pytest.mark.parametrize("file", ["manifest.json", FILE])
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(tmp_path: Path, file: str, kind: str) -> None:
    dist.save(state(), tmp_path, step=1)
    dist.save(state(3), tmp_path, step=2, keep=2)
    newer = "step_0000000002"
    other_kinds(tmp_path / newer / file, kind)
    with deadline():
        with pytest.raises(CheckpointDamagedError, match=f"{file} is {KINDS[kind]}, but a checkpoint consists of"):
            dist.load(state(2), tmp_path / newer)
        into = state(2)
        assert dist.load(into, tmp_path) == 1
        assert plain(into) == plain(state())
        manager = dist.CheckpointManager(tmp_path, asynchronous=False)
        assert manager.restore(into) == 1
        assert manager.save(5, into)
        manager.close()


@pytest.mark.parametrize("kind", ["pipe", "link", "device"])
def test_a_pointer_that_is_no_regular_file_is_not_read(tmp_path: Path, kind: str) -> None:
    for step in (1, 2):
        dist.save(state(step), tmp_path, step=step, keep=3)
    other_kinds(tmp_path / "latest", kind)
    with deadline():
        assert dist.load(state(), tmp_path) == 2
        assert Root(tmp_path).retire(1) == [STEP]


def test_a_manifest_of_any_size_is_not_read_into_memory(tmp_path: Path) -> None:
    dist.save(state(), tmp_path, step=1)
    os.truncate(tmp_path / STEP / "manifest.json", 1 << 40)
    with pytest.raises(CheckpointDamagedError, match="which is more than it can have"):
        dist.load(state(), tmp_path / STEP)


def test_a_large_file_without_a_digest_is_not_read_into_memory(tmp_path: Path) -> None:
    dist.save(state(), tmp_path, step=1)
    os.truncate(tmp_path / STEP / "manifest.json", (4 << 30) - 1)
    with pytest.raises(CheckpointDamagedError, match=r"manifest.json is truncated or was changed: it has no digest"):
        dist.load(state(), tmp_path / STEP)


def test_a_large_pointer_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        dist.save(state(step), tmp_path, step=step, keep=3)
    os.truncate(tmp_path / "latest", 1 << 30)
    monkeypatch.setattr("paceline.train.checkpoint.format.local_storage._LocalFile.read_into", None)
    assert latest_name(Root(tmp_path).storage) is None


def test_a_directory_of_a_checkpoint_may_be_a_link(tmp_path: Path) -> None:
    for step in (1, 2):
        dist.save(state(step), tmp_path / "run", step=step, keep=3)
    (tmp_path / "run" / STEP).rename(tmp_path / "elsewhere")
    (tmp_path / "run" / STEP).symlink_to("../elsewhere")
    into = state(3)
    assert dist.load(into, tmp_path / "run" / STEP) == 1
    assert plain(into) == plain(state(1))
    assert Root(tmp_path / "run").retire(1) == [STEP]
    assert FILE in os.listdir(tmp_path / "elsewhere")


numbers = st.sampled_from([-(2**63), -1, 0, 1, 7, 8, 63, 2**31, 2**40, 2**62, 2**64 - 1]) | st.integers(-99, 999)
texts = st.sampled_from(["", "..", "/etc/passwd", "../x", FILE, "manifest.json", "F64", "I8", "model/0.bias"])
anything = numbers | texts | st.none() | st.booleans() | st.lists(numbers, max_size=3) | st.just({}) | st.floats()


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*path, key)
        yield from places_in(each, (*path, key))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    dist.save(state(), root, step=1)
    return root


@settings(max_examples=examples(150))
@given(data=st.data())
def test_a_changed_manifest_is_refused_or_gives_what_was_saved(saved: Path, data: st.DataObject) -> None:
    """Whatever the manifest contains, tensors consist of bytes that were written, and values come from the manifest."""
    found = json.loads((saved / STEP / "manifest.json").read_bytes())
    changed = copy.deepcopy(found)
    for _ in range(data.draw(st.integers(1, 2))):
        places = [each for each in places_in(changed) if each[0] not in ("values", "digest")]
        *path, last = data.draw(st.sampled_from(places))
        inner = changed
        for key in path:
            inner = inner[key]
        inner[last] = data.draw(anything)
    with tempfile.TemporaryDirectory() as directory:
        copied = Path(directory) / STEP
        copied.mkdir()
        os.link(saved / STEP / FILE, copied / FILE)
        write_manifest(copied, changed)
        Root(directory).listing()
        into = state(2)
        try:
            dist.load(into, copied)
        except CheckpointError:
            return
        assert plain(into) == plain(state())


# - Files from other programs


def safetensors(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def info(dtype: str, shape: list[int], *offsets: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [*offsets]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"w": info("F32", [2], -8, 0)}, "do not begin at 0"),
        ({"w": info("F32", [2], -8, 0), "v": info("F32", [4], 0, 16)}, "do not begin at 0"),
        ({"w": info("F32", [2], 0, 8), "v": info("F32", [4], 0, 16)}, "do not begin at 8"),
        ({"w": info("F32", [4], 0, 16), "v": info("F32", [2], 8, 16)}, "do not begin at 16"),
        ({"w": info("F32", [2], 8, 16)}, "do not begin at 0"),
        ({"w": info("F32", [2], 0, 8)}, "its tensors end at"),
        ({"w": info("F32", [8], 0, 32)}, "is truncated"),
        ({"w": info("F32", [4], 16, 0)}, "for w"),
        ({"w": info("F32", [-2, -2], 0, 16)}, "for w"),
        ({"w": info("F32", [3], 0, 16)}, "for w"),
        ({"w": info("F99", [4], 0, 16)}, "for w"),
        ({"w": info("F32", [1 << 62, 4], 0, 16)}, "for w"),
        ({"w": {"dtype": "F32", "shape": [4]}}, "not that of a safetensors file"),
        ({"w": info("F32", [4], 0, 16), "__metadata__": {"a": 1}}, "not that of a safetensors file"),
        (b"[" * 100_000, "not that of a safetensors file"),
        (b'{"w\xff": 1}', "not that of a safetensors file"),
        ({"w": info("F32", [1 << 63, 0], 0, 0)}, "for w"),
        ({"w": info("F32", [1 << 62] * 60_000, 0, 16)}, "59936 more. with bytes"),
    ],
)
def test_safetensors_that_mislead_are_refused(tmp_path: Path, header: Any, said: str) -> None:
    safetensors(tmp_path / "m.safetensors", header, bytes(16))
    with pytest.raises(CheckpointDamagedError, match=said):
        open_foreign(tmp_path / "m.safetensors")


def test_a_header_that_ends_after_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes((1 << 20).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointDamagedError, match="its header has 1,048,584 bytes, but the file has 10"):
        open_foreign(tmp_path / "m.safetensors")


SIZES = {"F32": 4, "BF16": 2, "U8": 1, "I64": 8}


@settings(max_examples=examples(150))
@given(data=st.data())
def test_changed_safetensors_are_refused_or_give_each_byte_once(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.tuples(st.sampled_from([*SIZES]), st.integers(0, 4)), min_size=1, max_size=3))
    header, at = {}, 0
    for number, (dtype, count) in enumerate(shapes):
        header[f"t{number}"] = info(dtype, [count], at, at + count * SIZES[dtype])
        at += count * SIZES[dtype]
    content = bytes(range(1, at + 1))
    for _ in range(data.draw(st.integers(0, 2))):
        *path, last = data.draw(st.sampled_from([*places_in(header)]))
        inner: Any = header
        for key in path:
            inner = inner[key]
        inner[last] = data.draw(anything | st.sampled_from([*SIZES]) | st.integers(0, 16))
        if not isinstance(header, dict) or not header:
            return
    with tempfile.TemporaryDirectory() as directory:
        safetensors(Path(directory) / "m.safetensors", header, content)
        try:
            found = open_foreign(Path(directory) / "m.safetensors")
            assert found is not None
            tensors: Any = state_of(found)
        except CheckpointError:
            return
        memories = [bytes(each.contiguous().view(-1).view(torch.uint8).tolist()) for each in tensors.values()]
        assert b"".join(sorted(memories)) == content


def name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def torch_tensor(shape: list[int], strides: list[int], offset: int = 0, count: int = 4) -> bytes:
    """Returns opcodes for a float32 tensor in storage 0."""
    storage = b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + number(count) + b"tQ"
    sizes, steps = (b"(" + b"".join(map(number, each)) + b"t" for each in (shape, strides))
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    return (
        rebuild
        + b"("
        + storage
        + number(offset)
        + sizes
        + steps
        + b"\x89"
        + name("collections", "OrderedDict")
        + b")RtR"
    )


def repeated(container: str) -> bytes:
    """Returns a pickle of a dict whose last value contains 2^50 values."""
    data = b"\x80\x02}" + text("k") + {"list": b"]", "tuple": b")", "dict": b"}"}[container] + b"q\x01s"
    for index in range(50):
        inner = bytes([ord("h"), index + 1])
        twice = {"list": b"](" + inner * 2 + b"e", "tuple": inner * 2 + b"\x86"}
        twice["dict"] = b"}(" + text("a") + inner + text("b") + inner + b"u"
        data += text(str(index)) + twice[container] + bytes([ord("q"), index + 2]) + b"s"
    return data + b"."


def of_value(opcodes: bytes) -> bytes:
    return b"\x80\x02}" + text("w") + opcodes + b"s."


NESTED = b")" + b"\x85" * 150_000
HOSTILE_PICKLES = {
    "a key nested 150,000 deep": (b"\x80\x02}" + NESTED + b"Ns.", "a key that is neither a scalar nor a short tuple"),
    "a set of nested tuples": (of_value(name("builtins", "set") + b"](" + NESTED + b"e\x85R"), "a key that is neither"),
    "an ordered dict": (of_value(name("collections", "OrderedDict") + b"]" + NESTED + b"N\x86a\x85R"), "a key that"),
    "a key of 2^50 parts": (repeated("tuple")[:-1] + b"h\x33Ns.", "a key that is neither"),
    "lists of 2^50 values": (repeated("list"), "repeats its values until there are"),
    "tuples of 2^50 values": (repeated("tuple"), "repeats its values until there are"),
    "dicts of 2^50 values": (repeated("dict"), "repeats its values until there are"),
    "a tensor before its storage": (of_value(torch_tensor([4], [1], offset=-1)), "does not consist of sizes"),
    "a tensor after its storage": (of_value(torch_tensor([4], [1], offset=1)), "a tensor of .4. in a storage of 16"),
    "a larger tensor": (of_value(torch_tensor([5], [1])), "a tensor of .5. in a storage of 16 bytes"),
    "a larger stride": (of_value(torch_tensor([2], [1 << 62])), "a tensor of .2. in a storage of 16 bytes"),
    "a negative stride": (of_value(torch_tensor([4], [-1], offset=3)), "does not consist of sizes"),
    "a size beyond 2^63": (of_value(torch_tensor([0, 1 << 63], [1, 1])), "does not consist of sizes"),
    "a negative storage": (of_value(torch_tensor([0], [1], count=-4)), "a storage of an unknown kind or size"),
    "a call of bytearray": (of_value(name("builtins", "bytearray") + number(1 << 40) + b"\x85R"), "requests memory"),
    "a call of Tensor": (of_value(name("torch", "Tensor") + number(1 << 40) + b"\x85R"), "requests memory"),
    "a new Tensor": (of_value(name("torch", "FloatTensor") + number(1 << 40) + b"\x85\x81"), "requests memory"),
    "a call of a storage": (of_value(name("torch.storage", "UntypedStorage") + number(1 << 40) + b"\x85R"), "requests"),
    "a tensor by another function": (
        of_value(
            name("torch._tensor", "_rebuild_from_type_v2")
            + b"(" + name("torch", "Tensor") * 2 + number(1 << 40) + b"\x85NtR"
        ),
        "requests memory",
    ),
    "a nested tensor": (of_value(name("torch._utils", "_rebuild_nested_tensor") + b"(NNNNtR"), "without storage"),
}  # fmt: skip


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("which", HOSTILE_PICKLES)
def test_pickles_that_crash_or_exhaust_torch_are_refused(tmp_path: Path, which: str, is_zip: bool) -> None:
    data, said = HOSTILE_PICKLES[which]
    if is_zip:
        torch_file(tmp_path / "m.pt", lambda _: data)
    else:
        torch.save({"w": torch.arange(4.0)}, tmp_path / "m.pt", _use_new_zipfile_serialization=False)
        content = (tmp_path / "m.pt").read_bytes()
        begin = content.index(b"\x80\x02}q\x00X\x01\x00\x00\x00w")
        end = content.index(b".\x80\x02]", begin) + 1
        (tmp_path / "m.pt").write_bytes(content[:begin] + data + content[end:])
    with deadline(), pytest.raises(CheckpointError, match=said):
        open_foreign(tmp_path / "m.pt")


def test_a_small_file_that_expands_to_gigabytes_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("m/data.pkl", b"\x80\x02" + b"N0" * (1 << 24) + b"N.")
    with pytest.raises(CheckpointDamagedError, match="its record m/data.pkl is compressed"):
        open_foreign(tmp_path / "m.pt")


def torch_file(path: Path, change: Callable[[bytes], bytes], compression: int = zipfile.ZIP_STORED) -> dict[str, Any]:
    """Writes a torch.save file with its pickle replaced; returns the original pickle."""
    held = {"w": torch.arange(4.0), "v": torch.full((5,), 7, dtype=torch.int16), "n": [1, "a"]}
    file = io.BytesIO()
    torch.save(held, file)
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(path, "w", compression) as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, change(data) if name.endswith("data.pkl") else data)
    return held


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace(b"K\x04", b"K\x40"), "a tensor of 256 bytes is listed in its record 0"),
        (lambda text: text.replace(b"K\x04t", b"K\x03t"), "a tensor of .4. in a storage of 12 bytes"),
        (lambda text: text.replace(b"FloatStorage", b"DoubleStorage"[:12]), "a storage of an unknown kind"),
        (lambda text: text.replace(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x001"), "two sizes of the storage 1"),
        (lambda text: text.replace(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x009"), "which has another size"),
        (lambda text: text[:30], "cannot be read|contains more than tensors"),
        (lambda text: b"\x80\x02]q\x00h\x00a.", "nested too deeply, or contains an object that contains itself"),
        (lambda text: b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", "nested too deeply|cannot be read"),
    ],
)
def test_files_of_torch_that_mislead_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    torch_file(tmp_path / "m.pt", change)
    with pytest.raises(CheckpointError, match=said):
        open_foreign(tmp_path / "m.pt")


def test_compressed_and_overlapping_records_are_refused(tmp_path: Path) -> None:
    torch_file(tmp_path / "m.pt", lambda text: text, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointDamagedError, match="is compressed, which torch.save does not do"):
        open_foreign(tmp_path / "m.pt")
    torch_file(tmp_path / "m.pt", lambda text: text)
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        at = next(each.header_offset for each in archive.infolist() if each.filename.endswith("data/0"))
    data = bytearray((tmp_path / "m.pt").read_bytes())
    data[at + 28 : at + 30] = struct.pack("<H", 60)  # the length of the extra field, which shifts the data
    (tmp_path / "m.pt").write_bytes(data)
    with pytest.raises(CheckpointDamagedError, match="is inconsistent: its record"):
        open_foreign(tmp_path / "m.pt")


@settings(max_examples=examples(100))
@given(st.integers(0, 400), st.integers(0, 255), st.integers(0, 400), st.integers(0, 255))
def test_changed_files_of_torch_are_refused_or_give_records(at, byte, other, second):
    def change(text: bytes) -> bytes:
        changed = bytearray(text)
        changed[at % len(text)], changed[other % len(text)] = byte, second
        return bytes(changed)

    with tempfile.TemporaryDirectory() as directory:
        held = torch_file(Path(directory) / "m.pt", change)
        memories = {bytes(each.view(torch.uint8).tolist()) for each in held.values() if isinstance(each, torch.Tensor)}
        try:
            found = open_foreign(Path(directory) / "m.pt")
        except CheckpointError:
            return
        assert found is not None
        for name in found.tensors:
            storage = found.read(name).untyped_storage()
            assert bytes(storage.tolist()) in memories | {b""}


@pytest.mark.parametrize("kind", ["pipe", "socket", "directory"])
@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_foreign_files_are_regular_ones(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_bytes(b"")
    other_kinds(tmp_path / name, kind)
    with deadline():
        if kind == "directory":
            assert open_foreign(tmp_path / name) is None
        else:
            with pytest.raises(CheckpointDamagedError, match=f"{name} is {KINDS[kind]}, but a checkpoint consists of"):
                open_foreign(tmp_path / name)


def test_a_link_that_a_person_names_is_followed(tmp_path: Path) -> None:
    held = torch_file(tmp_path / "held", lambda text: text)
    safetensors(tmp_path / "weights", {"w": info("F32", [4], 0, 16)}, torch.arange(4.0).numpy().tobytes())
    for name in ("held", "weights"):
        (tmp_path / f"link-{name}").symlink_to(name)
        tree: Any = state_of(open_foreign(tmp_path / f"link-{name}"))  # type: ignore[arg-type]  # it is known
        assert torch.equal(tree["w"], held["w"])
    dist.save(state(), tmp_path / "run", step=1)
    (tmp_path / "best").symlink_to(tmp_path / "run" / STEP)
    (tmp_path / "link-run").symlink_to("run")
    for path in ("best", "link-run"):
        into = state(2)
        dist.load(into, tmp_path / path)
        assert plain(into) == plain(state())


@pytest.mark.parametrize("kind", ["pipe", "link", "device", "socket"])
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_directories_of_dcp_consist_of_regular_files(tmp_path: Path, file: str, kind: str) -> None:
    dcp.save({"w": torch.arange(4.0), "n": {"x": 1}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other_kinds(tmp_path / "dcp" / file, kind)
    with deadline(), pytest.raises(CheckpointError, match=rf"{file}(, which is outside| is {KINDS[kind]})"):
        found = open_foreign(tmp_path / "dcp")
        assert found is not None
        state_of(found)


def test_a_path_that_is_not_utf8_is_saved_and_loaded(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    dist.save(state(), path, step=1)
    into = state(2)
    assert dist.load(into, path) == 1
    assert plain(into) == plain(state())
    torch.save({"values": 3}, f"{path}/m.pt")
    loaded = {"values": None}
    dist.load(loaded, f"{path}/m.pt")
    assert loaded == {"values": 3}
    manager = dist.CheckpointManager(path, asynchronous=False)
    assert manager.restore(into) == 1
    manager.close()
