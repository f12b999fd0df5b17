"""Addresses at which the engine reads and writes a call's tensors, and copies of tensors that are not plain.

The engine bypasses PyTorch when it writes to memory, so `count_writes` reports the writes to autograd. Bytes are passed
as uint8 tensors on the CPU (`as_tensor`, `as_memory`), regardless of torch.set_default_device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, cast

import torch

from paceline import _core
from paceline.comm.engine.channel import DTYPE_CODES, DevicePieces, ReduceOp

Count = Callable[[Iterable[object]], None]  # reports writes to tensors

_increment = torch._C._increment_version


def _one_by_one(tensors: Iterable[object]) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
            _increment(tensor)


def _increment_versions() -> Count:
    """Returns PyTorch's function or, where it accepts only one tensor, a function that loops over the tensors."""
    try:
        _increment([torch.empty(0, device="cpu")])
    except TypeError:
        return _one_by_one
    return cast("Count", _increment)


# Increments each tensor's version counter, which the tensor shares with its views and the results of `detach()`. A
# backward pass that needs an earlier value of a tensor then raises an error instead of computing wrong gradients.
# Counting a write twice is harmless.
count_writes: Count = _increment_versions()


_core.read_tensors(torch.Tensor, torch.nn.Parameter, ReduceOp, count_writes)


Tensors = torch.Tensor | Sequence[torch.Tensor]


def as_list(tensors: Tensors, argument: str) -> list[torch.Tensor]:
    """Converts a tensor or a sequence of tensors to a list."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if isinstance(tensors, (list, tuple)) and all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return list(tensors)
    raise TypeError(f"{argument}: the argument must be a tensor or a list of tensors, not {kind_of(tensors)}")


def unpack_single(tensors: Tensors) -> Tensors:
    """Unpacks a list that contains a single tensor, because the fastest path of a call requires a bare tensor."""
    return tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors


def require_tensors(call: str, **arguments: object) -> None:
    """Checks that each of a call's arguments, given by name, is a single tensor."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{call}: {name} must be a tensor, not {kind_of(value)}")


def kind_of(value: object) -> str:
    """Describes the type of a value that should have been a tensor or a list of tensors.

    >>> kind_of(1.0), kind_of([1.0, 2.0]), kind_of([])
    ('float', 'list of float', 'empty list')
    """
    kind = type(value).__name__
    if not isinstance(value, (list, tuple)):
        return kind
    others = sorted({type(element).__name__ for element in value if not isinstance(element, torch.Tensor)})
    return f"{kind} of {' and '.join(others)}" if others else f"empty {kind}" if not value else f"{kind} of tensors"


def dtype_code(tensors: Sequence[torch.Tensor], call: str) -> int:
    """Returns the code of the tensors' common dtype."""
    first = tensors[0].dtype if tensors else torch.uint8
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise TypeError(f"{call} got a tensor of layout {tensor.layout}; use tensor.to_dense()")
        if tensor.dtype != first:
            raise TypeError(
                f"{call} got tensors of {first} and {tensor.dtype}; all tensors of a call must have the same type"
            )
    code = DTYPE_CODES.get(first)
    if code is None:
        raise TypeError(f"{call} does not support tensors of {first}; it supports {', '.join(map(str, DTYPE_CODES))}")
    return code


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns True if the tensor is contiguous and neither a conjugate nor a negative view."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


MemoryLayout: TypeAlias = tuple[int, torch.Size, tuple[int, ...], torch.dtype, bool, bool]


def memory_layout(tensor: torch.Tensor) -> MemoryLayout:
    """Returns the address and layout of a dense tensor; tensors at the same address may differ in layout."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def address_of(tensor: torch.Tensor) -> int:
    """Returns the address of a tensor's values; raises a ValueError if the tensor has elements but no memory."""
    address = tensor.data_ptr()
    if address == 0 and tensor.is_cpu and tensor.numel() > 0:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} has no memory: its storage was freed, for instance by "
            "untyped_storage().resize_(0), or it is the FakeTensor of a program that is only traced. Pass a tensor "
            "that has values"
        )
    return address


def count_elements(tensors: Sequence[torch.Tensor]) -> int:
    """Returns the total number of elements in `tensors`."""
    return sum(tensor.numel() for tensor in tensors)


def as_tensor(data: bytes | bytearray) -> torch.Tensor:
    """Returns `data` as a one-dimensional uint8 tensor; a bytearray is not copied."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)


def as_memory(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous CPU tensor as a view, which is valid while the tensor exists."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def empty_buffers(lengths: Sequence[int]) -> list[torch.Tensor]:
    """Allocates uninitialized uint8 tensors of the given lengths, each with its own memory."""
    return [torch.empty(length, dtype=torch.uint8, device="cpu") for length in lengths]


class Buffers:
    """The memory of a call's tensors; tensors that are not plain are replaced by copies.

    Args:
        scale: the factor by which the tensors that the call reads are multiplied when they are copied.
        any_order: whether to pass the elements of channels-last tensors in memory order. The caller guarantees that all
            ranks use the same layout.
    """

    def __init__(self, scale: float | torch.Tensor | None = None, any_order: bool = False) -> None:
        self.kept: list[torch.Tensor] = []
        self.written: list[torch.Tensor] = []  # the caller's tensors (`kept` may contain copies instead)
        self.has_copies = False
        self.profiled: list[torch.Tensor] | None = None  # if set, recorded in a profile in place of the tensors to read
        self.residual: torch.Tensor | None = None  # kept alive during the call
        self.note = ""  # the beginning of the error message for a mismatch, if the program made a different call
        self._copy_back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.scale = scale
        self._any_order = any_order

    def read(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Returns the address and the number of bytes of each tensor that the call reads."""
        first = len(self.kept)
        flat: list[int] = []
        for tensor in tensors:
            dense = tensor.detach() if self._usable(tensor) else self._copy(tensor)
            self.kept.append(dense)
            flat += (address_of(dense), dense.nbytes)
        return flat if not tensors or tensors[0].is_cpu else DevicePieces(self.kept[first:], flat)

    def write(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Returns the address and the number of bytes of each tensor that the call writes or updates."""
        first = len(self.kept)
        flat: list[int] = []
        self.written += tensors
        for tensor in tensors:
            dense = tensor
            if not self._usable(tensor):
                dense = self._copy(tensor)
                self._copy_back.append((tensor.detach(), dense))
            self.kept.append(dense)
            flat += (address_of(dense), dense.nbytes)
        return flat if not tensors or tensors[0].is_cpu else DevicePieces(self.kept[first:], flat)

    @property
    def finish(self) -> Callable[[], None] | None:
        """Returns a function to run when the call is complete, or None if no tensor was copied.

        Copies that are only read also need such a function. On a device, the function makes the program's streams wait
        before the memory of the copies can be reused.
        """
        return self._write_back if self.has_copies else None

    def _usable(self, tensor: torch.Tensor) -> bool:
        if self.scale is not None:
            return False
        return is_plain(tensor) or (self._any_order and _is_channels_last(tensor))

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        self.has_copies = True
        dense = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        return dense if self.scale is None else dense.mul_(self.scale)

    def _write_back(self) -> None:
        for tensor, dense in self._copy_back:
            tensor.copy_(dense)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    if tensor.is_conj() or tensor.is_neg():
        return False
    return (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)) or (
        tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)
    )
