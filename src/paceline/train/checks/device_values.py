"""Norms and digests that are computed on a device and read by the host in a later step.

Reading a number from a device makes the host wait for all previously enqueued work, and leaves the device idle until
the host enqueues more. The checks therefore enqueue the computation followed by a copy to pinned host memory, and read
the numbers in a later step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.comm.engine.adapters.device_streams import record_current
from paceline.comm.engine.channel import byte_view
from paceline.train.module_tensors import digest_of_text, pinned_like


class HostCopy:
    """An asynchronous copy of a flat tensor to host memory, enqueued on the current stream of the tensor's device."""

    def __init__(self, values: torch.Tensor) -> None:
        self._host = torch.empty_like(values) if values.is_cpu else pinned_like(values)
        self._host.copy_(values, non_blocking=True)
        self._copied = record_current(values.device)

    def is_complete(self) -> bool:
        """Returns True if the values can be read without waiting for the device."""
        return self._copied.done()

    def read(self) -> list[float]:
        """Returns the values; waits for the device if the copy is not complete."""
        if not self.is_complete():
            self._copied.wait()
        values: list[float] = self._host.tolist()
        return values


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class LabeledNorms:
    """Maximum norms of tensors on one device. A norm is NaN or infinite if its tensor contains NaN or infinity."""

    labels: list[tuple[str, int]]  # for each tensor
    norms: HostCopy


class DeviceNorms:
    """Computes the maximum norm of each tensor on its device, with few kernel launches."""

    def __init__(self) -> None:
        self._labels: dict[torch.device, list[tuple[str, int]]] = {}
        self._norms: dict[torch.device, list[torch.Tensor]] = {}
        self.nbytes = 0  # the total size of the added tensors

    def __bool__(self) -> bool:
        return bool(self._norms)

    def add(self, role: str, numbered: Iterable[tuple[int, torch.Tensor | None]]) -> None:
        """Enqueues the norm computation of floating-point and complex tensors, labeled with role and position."""
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[torch.Tensor]]] = {}
        for position, tensor in numbered:
            if tensor is not None and tensor.numel() and (tensor.dtype in _FLOATS or tensor.is_complex()):
                found = kinds.setdefault((tensor.device, tensor.dtype), ([], []))
                found[0].append(position)
                found[1].append(tensor.detach())
                self.nbytes += tensor.nbytes
        for (device, _), (found_positions, found_tensors) in kinds.items():
            norms = torch.stack(torch._foreach_norm(found_tensors, float("inf"))).double()
            self._labels.setdefault(device, []).extend((role, position) for position in found_positions)
            self._norms.setdefault(device, []).append(norms)

    def enqueue_copies(self) -> list[LabeledNorms]:
        """Enqueues one copy per device to the host, and clears the norms collected so far."""
        copies = [LabeledNorms(self._labels[at], HostCopy(torch.cat(norms))) for at, norms in self._norms.items()]
        self.clear()
        return copies

    def clear(self) -> None:
        """Discards the norms collected so far."""
        self._labels.clear()
        self._norms.clear()
        self.nbytes = 0


_WORDS = 1 << 22  # 8-byte words hashed at a time; hashing allocates memory for twice as many
_SMALL_BYTES = 1 << 16  # tensors up to this size are hashed together


@dataclass
class _Digest:
    """A pending digest: the dictionary entry to write, and the text and sums from which the digest is computed."""

    into: dict[str, int]
    name: str
    text: str
    sums: list[int] = field(default_factory=list)  # indices into the device's list of sums


class DeviceDigests:
    """Computes digests of tensors on their devices, and copies only a few bytes per tensor to the host.

    Digests are comparable only between ranks that add tensors of the same sizes in the same order, such as replicas. A
    tensor's memory is read as 64-bit words x. The word at position i is mapped to (x ^ (x >>> 32)) * w(i), where w(i)
    is an odd pseudorandom factor, and the mapped words are summed modulo 2^64. The map is invertible, so a change to a
    single word always changes the sum.
    """

    def __init__(self) -> None:
        self._digests: dict[torch.device, list[_Digest]] = {}
        self._tensors: dict[torch.device, list[torch.Tensor]] = {}
        self._copies: list[tuple[list[_Digest], HostCopy]] = []

    def __bool__(self) -> bool:
        return bool(self._digests or self._copies)

    def add(self, into: dict[str, int], name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor; `into[name]` is 0 until `read` stores the tensor's digest there."""
        into[name] = 0
        text = f"{tensor.dtype}{list(tensor.shape)}"
        self._digests.setdefault(tensor.device, []).append(_Digest(into, name, text))
        self._tensors.setdefault(tensor.device, []).append(tensor.detach())

    def enqueue(self) -> None:
        """Enqueues the computation on the tensors' current values, and the copy of the results to the host."""
        for device, digests in self._digests.items():
            self._copies.append((digests, HostCopy(_sums_of(self._tensors[device], digests))))
        self._digests, self._tensors = {}, {}

    def read(self) -> None:
        """Waits for all digests and stores them in the dictionaries passed to `add`."""
        self.enqueue()
        copies, self._copies = self._copies, []
        for digests, copy in copies:
            sums = copy.read()
            for digest in digests:
                text = f"{digest.text}{[int(sums[index]) for index in digest.sums]}"
                digest.into[digest.name] = digest_of_text(text)


def _sums_of(tensors: Sequence[torch.Tensor], digests: Sequence[_Digest]) -> torch.Tensor:
    """Computes the sums for all tensors on one device, and records in each digest the indices of its sums."""
    largest = max(sum(tensor.nbytes // 8 + 1 for tensor in tensors if tensor.nbytes <= _SMALL_BYTES), _SMALL_BYTES)
    largest = max(largest, *(tensor.nbytes // 8 + 1 for tensor in tensors))
    factors = _factors(tensors[0].device, min(largest, _WORDS))
    sums: list[torch.Tensor] = []
    small: list[tuple[_Digest, torch.Tensor]] = []
    total = 0
    for digest, tensor in zip(digests, tensors, strict=True):
        memory = _bytes_of(tensor)
        whole = 0 if memory.numel() <= _SMALL_BYTES else memory.numel() // 8 * 8
        for first in range(0, whole, 8 * _WORDS):
            words = memory[first : min(first + 8 * _WORDS, whole)].view(torch.int64)
            sums.append(_mixed(words, factors).sum().view(1))
            digest.sums.append(total)
            total += 1
        if whole < memory.numel():
            small.append((digest, memory[whole:]))
    for batch in _batches(small):
        sums.append(_sums_of_small([memory for _, memory in batch], factors))
        for digest, _ in batch:
            digest.sums.append(total)
            total += 1
    return torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64, device=tensors[0].device)


def _factors(device: torch.device, count: int) -> torch.Tensor:
    """Returns an odd pseudorandom factor for each position (a Weyl sequence based on the golden ratio)."""
    factors = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    return factors.mul_(-7046029254386353131).bitwise_or_(1)


def _mixed(words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    high = (words >> 32).bitwise_and_(0xFFFFFFFF)
    return high.bitwise_xor_(words).mul_(factors[: len(words)])


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's memory as uint8; copies the tensor unless it is contiguous and aligned."""
    flat = tensor.detach().contiguous().resolve_conj().resolve_neg()
    if flat.numel() and (flat.storage_offset() * flat.element_size()) % 8 and flat.nbytes > _SMALL_BYTES:
        flat = flat.clone()
    return byte_view(flat)


def _batches(small: Sequence[tuple[_Digest, torch.Tensor]]) -> list[list[tuple[_Digest, torch.Tensor]]]:
    batches: list[list[tuple[_Digest, torch.Tensor]]] = []
    left = 0
    for digest, memory in small:
        words = -(-memory.numel() // 8)
        if words > left or not batches:
            batches.append([])
            left = _WORDS
        batches[-1].append((digest, memory))
        left -= words
    return batches


def _sums_of_small(memories: Sequence[torch.Tensor], factors: torch.Tensor) -> torch.Tensor:
    """Computes the sum of each zero-padded tensor's words as the difference between two entries of a cumulative sum."""
    device = memories[0].device
    zeros = torch.zeros(8, dtype=torch.uint8, device=device)
    padded = [part for memory in memories for part in (memory, zeros[: -memory.numel() % 8])]
    ends, end = [], 0
    for memory in memories:
        end += -(-memory.numel() // 8)
        ends.append(end)
    running = _mixed(torch.cat(padded).view(torch.int64), factors).cumsum(0)
    running = torch.cat([running.new_zeros(1), running])
    at = torch.tensor([0, *ends], dtype=torch.int64, device="cpu")
    if device.type != "cpu":
        at = pinned_like(at).copy_(at)
    return running[at.to(device, non_blocking=True)].diff()
