"""What torch.save wrote: a file of tensors and plain values, read without running anything that it says."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from paceline.checkpoint.foreign.state import infos_of
from paceline.checkpoint.format.regular_files import open_regular
from paceline.checkpoint.trees import take_apart
from paceline.errors import CheckpointDamagedError, CheckpointError

_PICKLE = "/data.pkl"
# The bytes of one element, by the classes of storages that files name.
_SIZES_OF_STORAGES = {
    **dict.fromkeys(("UntypedStorage", "ByteStorage", "CharStorage", "BoolStorage"), 1),
    **dict.fromkeys(("QInt8Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"), 1),
    **dict.fromkeys(("ShortStorage", "HalfStorage", "BFloat16Storage"), 2),
    **dict.fromkeys(("IntStorage", "FloatStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("LongStorage", "DoubleStorage", "ComplexFloatStorage"), 8),
    "ComplexDoubleStorage": 16,
}
_LOCAL_HEADER_NBYTES, _LENGTHS_AT = 30, 26  # of a record of a zip file, and the lengths of its name and extra field


class TorchFile:
    """A file of torch.save. Tensors are mapped from it, so that each process reads only what it uses."""

    kind = "a file of torch.save"

    def __init__(self, path: Path) -> None:
        """Reads the file's structure.

        Raises:
            CheckpointError: it holds objects other than tensors and plain values.
            CheckpointDamagedError: it is cut.
        """
        self.path = str(path)
        self._tensors: dict[str, torch.Tensor] = {}
        try:
            self.tree = take_apart("", _load(path), self._tensors)
        except RecursionError:
            raise CheckpointDamagedError(f"{path} is nested too deeply, or holds something that holds itself") from None
        self.tensors = infos_of(self._tensors)

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor on the CPU."""
        return self._tensors[name].detach()


def _load(path: Path) -> object:
    try:
        return _load_mapped(path)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, and to unpickle objects is to run what the file says: "
            f"{reason} Save state_dicts; or, if you trust the file, convert it by "
            f"`torch.save(torch.load({str(path)!r}, weights_only=False)['model'].state_dict(), 'new.pt')` or the like"
        ) from None
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointDamagedError(f"{path} cannot be read as a file of torch.save: {error}") from error


def _load_mapped(path: Path) -> object:
    """Maps the file if it can be mapped, which those from before torch 1.6 cannot be."""
    with open(open_regular(path, follows=True), "rb") as file:
        is_mapped = file.read(2) == b"PK" and _are_records_whole(path, file)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)


def _are_records_whole(path: Path, file: BinaryIO) -> bool:
    """Whether the file's records have the sizes that its pickle says; torch compares them only where it does not map.

    Raises:
        CheckpointDamagedError: a record has another size, or is not where it should be.
    """
    with zipfile.ZipFile(file) as archive:
        sizes = _sizes_of_records(path, archive, file)
        top = next((name.removesuffix(_PICKLE) for name in sizes if name.endswith(_PICKLE)), "")
        named = _Sizes(io.BytesIO(archive.read(f"{top}{_PICKLE}")))
        try:
            named.load()
        except Exception:  # a pickle with more than tensors and plain values; torch reads it, or says why it does not
            return False
    for key, nbytes in named.of_records:
        if sizes.get(f"{top}/data/{key}") != nbytes:
            raise CheckpointDamagedError(
                f"{path} contradicts itself: a tensor of {nbytes:,} bytes is said to be in its record {key}, "
                "which has another size or is compressed"
            )
    return True


def _sizes_of_records(path: Path, archive: zipfile.ZipFile, file: BinaryIO) -> dict[str, int]:
    """Returns the sizes of records that are not compressed, by name; none has bytes of another, or another's name."""
    records = sorted(archive.infolist(), key=lambda each: each.header_offset)
    ends = [*(each.header_offset for each in records[1:]), archive.start_dir]
    found: dict[str, int] = {}
    for each, end in zip(records, ends, strict=True):
        file.seek(each.header_offset + _LENGTHS_AT)
        begin = each.header_offset + _LOCAL_HEADER_NBYTES + sum(struct.unpack("<HH", file.read(4)))
        if each.filename in found or begin + each.compress_size > end:
            raise CheckpointDamagedError(f"{path} contradicts itself: its record {each.filename} is there twice")
        found[each.filename] = each.file_size if each.compress_type == zipfile.ZIP_STORED else -1
    return found


class _Inert:
    """Stands for whatever a pickle names or makes, and does nothing."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __call__(self, *_: object) -> _Inert:
        return _Inert()

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass


class _Sizes(pickle._Unpickler):  # in Python: the one in C takes as much memory as a pickle likes for its memo
    """Collects the keys and sizes of the records that a pickle refers to; it makes nothing of what the pickle names."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.of_records: set[tuple[str, int]] = set()

    def find_class(self, module: str, name: str) -> Any:
        return _Inert(name)

    def persistent_load(self, pid: Any) -> object:
        _, kind, key, _, count = pid
        self.of_records.add((str(key), int(count) * _SIZES_OF_STORAGES[kind.name]))
        return _Inert()
