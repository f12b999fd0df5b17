"""The state of a training run: everything that a joining worker must receive and that must be equal on all workers.

The state includes the gradients that no optimizer has used yet, which a checkpoint of an elastic job must contain.

`digest_of_state` returns equal digests if and only if the states are equal, regardless of the kinds of containers and
the order of entries. It computes a SHA-256 hash over the kind of a value and the parts of the value. Each part is
preceded by its length, so different states never yield the same bytes. The parts depend on the kind:

- tensors and numeric NumPy arrays: the dtype, the shape, and the elements in row-major order, regardless of device and
  strides;
- dicts and other mappings: the digests of keys and values, sorted by the digest of the key;
- sets: the digests of the elements, sorted;
- lists, tuples and their subclasses: the digests of the elements in order;
- bool, int, float, complex, str, bytes and their subclasses, such as NumPy scalars and enumerations: the value;
- anything else, including None: the string that `repr` returns.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol, runtime_checkable

import torch
import xxhash
from torch import nn
from torch.utils._pytree import tree_map_only

from paceline.train.elastic.agreement import WINDOWS
from paceline.train.gradient_use import is_pending, mark_used
from paceline.train.module_tensors import accelerators_of, key_finder, memory_of, uncompiled_key
from paceline.train.zero.optimizer_state import load_optimizer

# The possible causes of a difference between workers' states, for error messages.
CAUSES = (
    "The cause is corrupted memory, an operator that is not deterministic, or state that the workers do not share and "
    "ElasticState was not given"
)


class PendingGradients:
    """The gradients that a module has accumulated for the next optimizer step, equal on all workers.

    Gradients that an optimizer step has already used are excluded, because the next accumulation begins without them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, torch.Tensor | int]:
        """Returns the gradients by parameter name. A gradient of zeros is represented by the number 0."""
        pending = {name: param.grad for name, param in self.module.named_parameters() if is_pending(param)}
        return {
            uncompiled_key(self.module, name): 0 if _is_zero(gradient) else gradient
            for name, gradient in pending.items()
            if gradient is not None
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor | int]) -> None:
        """Sets the gradients in `state`, and removes the gradients of all other parameters."""
        own = {uncompiled_key(self.module, name): param for name, param in self.module.named_parameters()}
        find = key_finder(own.keys())
        state = {find(name): gradient for name, gradient in state.items()}
        for name, param in own.items():
            found = state.get(name)
            if isinstance(found, torch.Tensor):
                found = found.to(param.device, copy=True)
            param.grad = torch.zeros_like(param) if isinstance(found, int) else found


def _is_zero(gradient: torch.Tensor) -> bool:
    return gradient.layout is torch.strided and not gradient.any()


_LENGTH_NBYTES = 8


def digest_of_state(value: object) -> str:
    """Returns the SHA-256 digest of a nested state as 64 hexadecimal digits."""
    return _digest(value).hex()


def _digest(value: Any) -> bytes:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
            return _of_elements(value.dtype.name, value.shape, value.tobytes())
        value = value.tolist()
    if isinstance(value, torch.Tensor):
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        plain = dense.resolve_conj().resolve_neg()  # a reference that keeps the memory alive
        return _of_elements(str(value.dtype).removeprefix("torch."), value.shape, memory_of(plain))
    kind, parts = _parts(value)
    return _joined(kind, *parts)


def _of_elements(dtype: str, shape: Sequence[int], elements: bytes | memoryview) -> bytes:
    return _joined(b"tensor", f"{dtype}{[*shape]}".encode(), elements)


def _parts(value: Any) -> tuple[bytes, list[bytes]]:
    """Returns the kind of a value, and either the digests of its elements or its encoded value."""
    if isinstance(value, Mapping):
        entries = sorted((_digest(key), _digest(item)) for key, item in value.items())
        return b"mapping", [part for entry in entries for part in entry]
    if isinstance(value, (list, tuple)):
        return b"sequence", [_digest(item) for item in value]
    if isinstance(value, Set):
        return b"set", sorted(map(_digest, value))
    for kind, text_of in _PLAIN.items():
        if isinstance(value, kind):
            return kind.__name__.encode(), [text_of(value)]
    return b"other", [repr(value).encode()]


def _joined(*parts: bytes | memoryview) -> bytes:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(_LENGTH_NBYTES, "little"))
        total.update(part)
    return total.digest()


_PLAIN: dict[type, Callable[[Any], bytes]] = {  # bool must precede int, its base class
    bool: lambda value: str(value).encode(),
    int: lambda value: int.__repr__(value).encode(),
    float: lambda value: float.__repr__(value).encode(),
    complex: lambda value: complex.__repr__(value).encode(),
    str: lambda value: str.__str__(value).encode("utf-8", "surrogatepass"),
    bytes: bytes,
}


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored, such as an optimizer, scheduler, loader or module."""

    def state_dict(self) -> Any:
        """Returns the state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restores the state."""


class TrainingState:
    """The module's parameters and buffers, and the state of `others`.

    Args:
        module: The model. Its accumulated gradients are part of the state.
        others: The optimizer and all other objects with state, by name.
        is_replicated: Whether all workers compute the same values. If so, their random number generators have the same
            state, and their buffers are equal after each committed round. If not, each worker computes on its own part
            of a batch.
    """

    def __init__(self, module: nn.Module, others: Mapping[str, Stateful], *, is_replicated: bool = True) -> None:
        for name, other in others.items():
            if not isinstance(other, Stateful):
                raise TypeError(
                    f"ElasticState got {name}={type(other).__name__}; it must have state_dict() and load_state_dict(), "
                    "so that a worker that joins can receive its state"
                )
        self._module = module
        self.stateful = dict(others)
        self._is_replicated = is_replicated

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The module's parameters."""
        return [*self._module.parameters()]

    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers among these objects, by name."""
        return {name: other for name, other in self.stateful.items() if isinstance(other, torch.optim.Optimizer)}

    def capture(self) -> dict[str, Any]:
        """Returns the state on the CPU.

        Tensors in host memory are not copied, so training continues to change them. Tensors in shared or pinned memory
        are copied, because later changes to them would be visible in a forked child. Tensors on a device are copied to
        the CPU, because a forked child must not use the device.
        """
        state = {
            "parameters": [param.detach() for param in self._module.parameters()],
            "gradients": [param.grad for param in self._module.parameters()],
            "pending": [is_pending(param) for param in self._module.parameters()],
            "buffers": [buffer.detach() for buffer in self._module.buffers()],
            "others": {name: other.state_dict() for name, other in self.stateful.items()},
            "random": [torch.get_rng_state(), random.getstate()],
            "device_random": [
                torch.get_device_module(device).get_rng_state(device) for device in accelerators_of(self._module)
            ],
        }
        return on_host(state)

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Replaces this state with one that `capture` returned in any process."""
        _copy_all([*self._module.parameters()], state["parameters"])
        _copy_all([*self._module.buffers()], state["buffers"])
        for param, gradient in zip(self._module.parameters(), state["gradients"], strict=True):
            param.grad = None if gradient is None else gradient.to(param.device, copy=True)
        self._mark_used(state["pending"])
        for name, other in self.stateful.items():
            _load(other, state["others"][name])
        if not self._is_replicated:
            return
        torch_state, python_state = state["random"]
        torch.set_rng_state(torch_state)
        version, numbers, gauss = python_state
        random.setstate((version, tuple(numbers), gauss))
        for device, generator_state in zip(accelerators_of(self._module), state["device_random"], strict=True):
            torch.get_device_module(device).set_rng_state(generator_state, device)

    def capture_rest(self, is_known: Callable[[torch.Tensor], bool]) -> dict[str, Any]:
        """Returns, on the CPU, the state that a worker still lacks after repeating all optimizer steps.

        `is_known` returns whether the worker already has the gradient of a parameter.
        """
        rest = {
            "gradients": [None if is_known(param) else param.grad for param in self.parameters],
            "has_gradient": [param.grad is not None for param in self.parameters],
            "pending": [is_pending(param) for param in self.parameters],
            "buffers": [buffer.detach() for buffer in self._module.buffers()],
            "others": {name: _without_tensors(other) for name, other in self.stateful.items()},
        }
        return on_host(rest)

    @torch.no_grad()
    def restore_rest(self, rest: Mapping[str, Any]) -> None:
        """Completes this state with one that `capture_rest` returned in another process."""
        _copy_all([*self._module.buffers()], rest["buffers"])
        for param, gradient, has_gradient in zip(self.parameters, rest["gradients"], rest["has_gradient"], strict=True):
            if not has_gradient:
                param.grad = None
            elif gradient is not None:
                param.grad = gradient.to(param.device)
        self._mark_used(rest["pending"])
        for name, other in self.stateful.items():
            _load(other, _with_tensors(other, rest["others"][name]))

    def _mark_used(self, pending: Sequence[bool]) -> None:
        mark_used(param for param, is_waiting in zip(self.parameters, pending, strict=True) if not is_waiting)

    def digest(self) -> str:
        """Returns the SHA-256 digest of the `state_dict`s of all objects as 64 hexadecimal digits."""
        values = self._module.state_dict(keep_vars=True).items()
        module = {name: tensor for name, tensor in values if isinstance(tensor, torch.Tensor)}
        others = {name: other.state_dict() for name, other in self.stateful.items()}
        return digest_of_state({"module": module, "others": others})

    @property
    def nbytes(self) -> int:
        """The number of bytes that `rolling_digest` covers in one cycle."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def rolling_digest(self, round_number: int) -> int:
        """Returns a digest (XXH3, 63 bits) of one sixteenth of the state's tensors.

        Consecutive rounds cover consecutive sixteenths.
        """
        tensors = self._tensors()
        sizes = [tensor.nbytes for tensor in tensors]
        window = -(-sum(sizes) // WINDOWS)
        start = (round_number % WINDOWS) * window
        stop = start + window
        total = xxhash.xxh3_64(seed=0)
        offset = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            first, last = max(start - offset, 0), min(stop - offset, size)
            if first < last:
                total.update(memory_of(tensor)[first:last])
            offset += size
        return total.intdigest() >> 1

    def _tensors(self) -> list[torch.Tensor]:
        """Returns the tensors that change during training, in the same order on every worker."""
        kept: list[list[Any]] = [
            [param.detach() for param in self._module.parameters()],
            [buffer for buffer in self._module.buffers() if self._is_replicated and not buffer.is_floating_point()],
        ]
        for optimizer in self.optimizers.values():
            params = [param for group in optimizer.param_groups for param in group["params"]]
            kept.append([optimizer.state.get(param, {}) for param in params])
        return [leaf for leaf in _leaves(kept) if isinstance(leaf, torch.Tensor)]


def _load(stateful: Stateful, state: Any) -> None:
    if isinstance(stateful, torch.optim.Optimizer):
        load_optimizer(stateful, state)
    else:
        stateful.load_state_dict(state)


def _without_tensors(stateful: Stateful) -> Any:
    """Returns an object's state. For an optimizer, the tensors that belong to a parameter are omitted."""
    state = stateful.state_dict()
    if not isinstance(stateful, torch.optim.Optimizer):
        return state
    kept = {
        param: {key: value for key, value in entries.items() if not isinstance(value, torch.Tensor)}
        for param, entries in state["state"].items()
        if isinstance(entries, Mapping)
    }
    return {**state, "state": kept}


def _with_tensors(stateful: Stateful, state: Any) -> Any:
    """Adds this process's tensors to a state that `_without_tensors` returned in another process."""
    if not isinstance(stateful, torch.optim.Optimizer):
        return state
    own = stateful.state_dict()["state"]
    kept = {
        param: {**entries, **state["state"].get(param, {})} if isinstance(entries, Mapping) else entries
        for param, entries in own.items()
    }
    return {**state, "state": kept}


def on_host(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a nested state with all tensors in private host memory, so a forked child keeps their current values.

    Tensors that are already in such memory are not copied.
    """
    moved: dict[str, Any] = tree_map_only(torch.Tensor, _in_private_memory, state)
    return moved


def _in_private_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cpu and tensor.layout is torch.strided and (tensor.is_shared() or tensor.is_pinned()):
        # Drivers either map pinned memory as shared memory, without copy-on-write, or hide it from a child process.
        return tensor.detach().clone()
    return tensor.cpu()


def _copy_all(mine: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(mine, given, strict=True):
        tensor.copy_(value)


def _leaves(value: Any) -> Iterator[Any]:
    """Yields the tensors and plain values in a nested state, in the same order in every process."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
