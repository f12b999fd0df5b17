"""TrackedTensors: the tensors that wrappers average and copy; functions to broadcast, hash and inspect tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import torch
import xxhash
from torch import nn

from paceline.comm.engine.adapters.device_streams import record_current
from paceline.comm.engine.channel import byte_view
from paceline.comm.group.buffers import as_memory, is_plain, memory_layout
from paceline.comm.group.process_group import ProcessGroup


def by_device(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Groups the tensors by device, because a collective's tensors must all be on one device."""
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return list(groups.values())


_COMPILED = "_orig_mod"  # the name of the original module in the module that torch.compile returns


def is_compiled(module: object) -> bool:
    """Returns True if `torch.compile` returned the module."""
    frames = sys.modules.get("torch._dynamo.eval_frame")  # imported only if needed, because the import is slow
    return frames is not None and isinstance(module, frames.OptimizedModule)


def uncompiled_key(module: nn.Module, key: str) -> str:
    """Returns the name that a tensor or submodule has if neither the module nor a submodule is compiled.

    `key` is the name in the module's `state_dict`, `named_parameters`, `named_buffers` or `named_modules`.
    """
    if _COMPILED not in key:
        return key
    within: nn.Module | None = module
    kept = []
    for name in key.split("."):
        if name != _COMPILED or not is_compiled(within):
            kept.append(name)
        within = None if within is None else within._modules.get(name)
    return ".".join(kept)


def key_finder(own: Set[str]) -> Callable[[str], str]:
    """Returns a function that converts the keys of a saved module, which may have been compiled, to keys in `own`.

    A key without a counterpart in `own` is returned without the names that `torch.compile` adds.
    """
    alike = {_without_compiled(key): key for key in own}

    def find(key: str) -> str:
        if key in own or _COMPILED not in key:
            return key
        short = _without_compiled(key)
        return alike.get(short, short)

    return find


def _without_compiled(key: str) -> str:
    return ".".join(name for name in key.split(".") if name != _COMPILED)


def accelerators_of(module: nn.Module) -> list[torch.device]:
    """Returns the devices of a module's parameters and buffers, except the CPU and the meta device."""
    devices = dict.fromkeys(tensor.device for tensor in (*module.parameters(), *module.buffers()))
    return [device for device in devices if device.type not in ("cpu", "meta")]


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Allocates a host tensor with the dtype and layout of `tensor`, in page-locked memory unless locking fails."""
    strides = torch.empty_like(tensor, device="meta").stride()
    try:
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu", pin_memory=True)
    except RuntimeError:  # some devices have no page-locked memory
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu")


def in_host_memory(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies tensors to the CPU, synchronizing once per device. Tensors already on the CPU are returned unchanged."""
    copies = [
        tensor if tensor.is_cpu else pinned_like(tensor).copy_(tensor.detach(), non_blocking=True) for tensor in tensors
    ]
    for device in dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_cpu):
        record_current(device).wait()
    return copies


def byte_views(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns contiguous tensors as flat uint8 views, so that one call can send several dtypes."""
    return [byte_view(tensor) for tensor in tensors if tensor.numel()]


def broadcast_tensors(tensors: list[torch.Tensor], group: ProcessGroup, root: int = 0) -> None:
    """Copies the root's values to all ranks. The tensors may have any dtypes and memory layouts."""
    plain = [tensor for tensor in tensors if is_plain(tensor)]
    for together in by_device(plain):
        group.broadcast(byte_views(together), root)
    for tensor in tensors:
        if not is_plain(tensor):
            group.broadcast(tensor.detach(), root)


def broadcast_bytes(views: list[torch.Tensor], group: ProcessGroup, root: int) -> None:
    """Copies the root's `byte_views`, which are on one device, to all ranks.

    On an accelerator, the views are packed into one flat tensor, because one call for each view would be slower.
    """
    if len(views) < 2 or views[0].is_cpu:
        group.broadcast(views, root)
        return
    flat = torch.cat(views)
    group.broadcast(flat, root)
    if group.rank() != root:
        torch._foreach_copy_(views, flat.split([view.numel() for view in views]))


def digest_of(tensors: Sequence[torch.Tensor]) -> int:
    """Computes a digest (XXH3, 63 bits) over the dtypes, shapes and values of tensors."""
    total = xxhash.xxh3_64(seed=0)
    for tensor in tensors:
        total.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        total.update(memory_of(tensor))
    return total.intdigest() >> 1


def digest_of_text(text: str) -> int:
    """Computes a digest (XXH3, 63 bits) of a string."""
    return xxhash.xxh3_64_intdigest(text.encode(), seed=0) >> 1


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns a tensor's bytes: a view of its memory if the tensor is contiguous and on the host, otherwise a copy."""
    flat = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    kept = as_memory(flat)
    return kept if memory_layout(flat) == memory_layout(tensor) else memoryview(bytes(kept))


_IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's DistributedDataParallel reads the same attribute


@dataclass(frozen=True)
class TrackedTensors:
    """The parameters and buffers of a module by name, excluding ignored tensors."""

    trained: dict[str, nn.Parameter]  # the parameters that require gradients
    frozen: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    sparse: frozenset[str]  # the names of the trained parameters that belong to layers with sparse gradients
    ignored: frozenset[str]  # the names of the parameters and buffers that wrappers neither copy nor average

    def tensors(self, with_buffers: bool = True) -> list[torch.Tensor]:
        """Returns all parameters and, by default, the buffers; meta buffers are omitted because they have no values."""
        buffers = [buffer for buffer in self.buffers.values() if not buffer.is_meta] if with_buffers else []
        return [*self.trained.values(), *self.frozen.values(), *buffers]


def collect_tracked(module: nn.Module, also_ignored: Iterable[str] = ()) -> TrackedTensors:
    """Collects a module's tensors in registration order; a tensor with several names is listed under the first name.

    Tensors are ignored if the module's class, or `ignore_tensors`, has listed their names in an attribute. As in torch,
    a parameter that several layers share is ignored only if all of its names are listed. Of the tensors in
    `also_ignored`, one name suffices.
    """
    listed, also_listed = frozenset(getattr(module, _IGNORED, ())), frozenset(also_ignored)
    all_params = list(module.named_parameters(remove_duplicate=False))
    kept = {id(param) for name, param in all_params if name not in listed}
    kept -= {id(param) for name, param in all_params if name in also_listed}
    ignored = (listed - {name for name, param in all_params if id(param) in kept}) | also_listed
    all_buffers = list(module.named_buffers(remove_duplicate=False))
    left_out = {id(tensor) for name, tensor in (*all_params, *all_buffers) if name in ignored}
    params = {name: param for name, param in module.named_parameters() if id(param) not in left_out}
    embeddings = [layer for layer in module.modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
    sparse = {id(layer.weight) for layer in embeddings if layer.sparse}
    return TrackedTensors(
        trained={name: param for name, param in params.items() if param.requires_grad},
        frozen={name: param for name, param in params.items() if not param.requires_grad},
        buffers={name: buffer for name, buffer in module.named_buffers() if id(buffer) not in left_out},
        sparse=frozenset(name for name, param in params.items() if param.requires_grad and id(param) in sparse),
        ignored=ignored,
    )


def ignore_tensors(module: nn.Module, names: Iterable[str]) -> None:
    """Excludes the named parameters and buffers of `module` from the tensors that wrappers copy and average.

    The names may include those of parameters and buffers that are None.

    Raises:
        ValueError: the module has no parameter or buffer with one of these names.
    """
    names = list(names)
    known = {
        f"{prefix}.{key}" if prefix else key
        for prefix, layer in module.named_modules(remove_duplicate=False)
        for table in (layer._parameters, layer._buffers)
        for key, _ in table.items()  # in a scripted module, the tables are not dicts but have `items`
    }
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"the module has no parameter or buffer {', '.join(map(repr, unknown))}; names are those of "
            "module.named_parameters() and module.named_buffers()"
        )
    setattr(module, _IGNORED, names)


class ModuleWrapper(Protocol):
    """An object that averages the gradients of a module."""

    module: nn.Module


_synchronized: WeakSet[ModuleWrapper] = WeakSet()


def mark_synchronized(wrapper: ModuleWrapper) -> None:
    """Records that a wrapper keeps all parameters of its module equal on all ranks, for as long as the wrapper exists.

    A module with ignored parameters is not recorded.
    """
    if not getattr(wrapper.module, _IGNORED, ()):
        _synchronized.add(wrapper)


def unmark_synchronized(wrapper: ModuleWrapper) -> None:
    """Records that the parameters may differ from now on, for example because a hook averages only some gradients."""
    _synchronized.discard(wrapper)


def synchronized_modules() -> list[nn.Module]:
    """Returns the modules whose parameters a wrapper keeps equal on all ranks."""
    return [wrapper.module for wrapper in _synchronized]


_storage_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def references_of(tensor: torch.Tensor) -> int | None:
    """Returns the reference count of a tensor's storage, or None if torch does not provide it."""
    return None if _storage_use_count is None else _storage_use_count(tensor.untyped_storage()._cdata)


_ALONE = references_of(torch.empty(1, device="cpu")) or 0


def shares_memory(gradient: torch.Tensor) -> bool:
    """Returns True if other tensors use the same storage, or if torch does not provide the reference count.

    Autograd may still pass the storage of a parameter's gradient to other layers: in `x + p.unsqueeze(0)`, with one
    sample, the gradients of `x` and `p` are views of one tensor. If the storage were reduced in place, those layers
    would receive the average.
    """
    count = references_of(gradient)
    return count is None or count > _ALONE
