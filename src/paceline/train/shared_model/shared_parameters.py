"""SharedParameters: parameters in memory that all ranks on a host map, with guards against invalid reads and writes.

Write to shared parameters only in the context `updating`, between the first collective of a step and the barrier at its
end. At any other time, other ranks may be reading the parameters. All other writers, such as `load_state_dict`, write
to private copies in the context `private`. Partly updated parameters can be neither used nor saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from operator import attrgetter

import torch
from torch import nn

from paceline.comm.engine.native.engine import HostRanks
from paceline.comm.group.buffers import count_writes, memory_layout
from paceline.comm.group.host_memory import share_on_host
from paceline.comm.group.process_group import ProcessGroup
from paceline.errors import CollectiveError
from paceline.train.module_tensors import broadcast_tensors, collect_tracked
from paceline.train.zero.shards import ALIGNMENT_BYTES, flat, is_dense


class TornGuard:
    """A module hook that raises an error while the module's parameters are only partly updated.

    `reason` is the error message, or None if parameters may be used. A copy of the module does not share parameters, so
    it gets a new guard without a reason.
    """

    def __init__(self) -> None:
        self.reason: str | None = None

    def __call__(self, *_: object) -> None:
        """Raises RuntimeError if `reason` is set."""
        if self.reason is not None:
            raise RuntimeError(self.reason)

    def __reduce__(self) -> tuple[type[TornGuard], tuple[()]]:
        return TornGuard, ()

    def watch(self, module: nn.Module) -> None:
        """Registers this guard as a hook on the module's forward pass and `state_dict`."""
        module.register_forward_pre_hook(self)
        module.register_state_dict_pre_hook(self)


_version = attrgetter("_version")
_of_modules: weakref.WeakKeyDictionary[nn.Module, SharedParameters] = weakref.WeakKeyDictionary()

_TORN = (
    "The parameters that the ranks of this host share are therefore only partly updated, and belong to no step; load a "
    "checkpoint in a new group of ranks"
)


class SharedParameters:
    """Moves a module's parameters to memory that the ranks on a host share; `group` contains the ranks on all hosts."""

    @classmethod
    def of(cls, module: nn.Module, group: ProcessGroup, ranks: HostRanks) -> SharedParameters:
        """Returns the module's SharedParameters, which optimizers for different parameters may share."""
        known = _of_modules.get(module)
        if known is None or known._group is not group:
            known = _of_modules[module] = cls(group, ranks, module)
        return known

    def __init__(self, group: ProcessGroup, ranks: HostRanks, module: nn.Module) -> None:
        self._group = group
        self._ranks = ranks
        self._params: list[torch.Tensor] = []
        self._names: list[str] = []
        self._shared: list[torch.Tensor] = []  # the parameters' data while not within `private`
        self._is_private = False
        self._torn = TornGuard()
        self._torn.watch(module)
        self.accept()

    def add(self, named: Mapping[str, torch.Tensor]) -> None:
        """Moves parameters, which must be equal on all ranks, to shared memory; all ranks must call it."""
        self._drop_replaced()
        known = {id(param) for param in self._params}
        new = {name: param for name, param in named.items() if id(param) not in known and param.numel()}
        offsets, nbytes = _lay_out(list(new.values()))
        if not new:
            return
        memory = share_on_host(self._group, nbytes)
        tensors = [
            memory.tensor(offset, param.nbytes).view(param.dtype).as_strided(param.shape, param.stride())
            for offset, param in zip(offsets, new.values(), strict=True)
        ]
        self._write([param.data for param in new.values()], tensors)
        self._group.barrier()
        self._params += new.values()
        self._names += new
        self._shared += tensors
        for param, shared in zip(new.values(), tensors, strict=True):
            param.data = shared
        self.accept()

    def accept(self) -> None:
        """Records the parameters' current versions and memory layouts as the reference for `changed`."""
        self._versions = list(map(_version, self._params))
        self._layouts = list(map(memory_layout, self._params))

    def changed(self) -> str | None:
        """Returns a description of a forbidden change to the parameters since `accept`, or None."""
        if self._is_private:
            return "called step() within full_parameters()"
        versions = list(map(_version, self._params))
        if versions != self._versions:
            return f"wrote to {self._first_difference(versions, self._versions)}"
        layouts = list(map(memory_layout, self._params))
        if layouts != self._layouts:
            return f"replaced the memory of {self._first_difference(layouts, self._layouts)}"
        return None

    def require_whole(self) -> None:
        """Raises RuntimeError if an update of the parameters failed before it was complete."""
        self._torn()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Returns a context for updating the parameters. An error in this context makes the parameters unusable."""
        self._torn.reason = _torn_reason(self._group, "an error")
        try:
            yield
        except Exception as error:
            self._torn.reason = _torn_reason(self._group, f"{type(error).__name__} ({error})")
            if isinstance(error, CollectiveError):
                error.args = (f"{error}. {_TORN}", *error.args[1:])
            raise
        self._torn.reason = None
        count_writes(self._params)  # includes writes by other ranks
        self.accept()

    @contextmanager
    def private(self) -> Iterator[None]:
        """Returns a context in which every rank has private parameters; on exit, rank 0's are copied to all ranks."""
        self.require_whole()
        own = [shared.clone() for shared in self._shared]
        self._bind(own)
        self._is_private = True
        try:
            yield
            own = [param.data for param in self._params]
            self._require_layout(own)
            broadcast_tensors(own, self._group)
            self._group.barrier()  # after this, all ranks are in `private`; none reads shared memory
            with self.updating():
                self._write(own, self._shared)
                self._group.barrier()
        finally:
            self._is_private = False
            self._bind(self._shared)
            self.accept()

    def _drop_replaced(self) -> None:
        """Stops managing parameters whose memory was replaced or narrowed, for example by `module.to(dtype)`."""
        pairs = zip(self._params, self._shared, strict=True)
        kept = [index for index, (param, shared) in enumerate(pairs) if memory_layout(param) == memory_layout(shared)]
        self._params = [self._params[index] for index in kept]
        self._names = [self._names[index] for index in kept]
        self._shared = [self._shared[index] for index in kept]

    def _bind(self, tensors: Sequence[torch.Tensor]) -> None:
        for param, tensor in zip(self._params, tensors, strict=True):
            param.data = tensor

    def _write(self, values: Sequence[torch.Tensor], shared: Sequence[torch.Tensor]) -> None:
        """Copies this rank's part of the values to shared memory; the values are equal on all ranks on the host."""
        host_ranks = self._ranks.here
        part, parts = host_ranks.index(self._ranks.rank), len(host_ranks)
        for value, tensor in zip(values, shared, strict=True):
            first, stop = tensor.numel() * part // parts, tensor.numel() * (part + 1) // parts
            flat(tensor)[first:stop].copy_(flat(value)[first:stop])

    def _require_layout(self, tensors: Sequence[torch.Tensor]) -> None:
        for name, tensor, shared in zip(self._names, tensors, self._shared, strict=True):
            if (tensor.shape, tensor.stride(), tensor.dtype) != (shared.shape, shared.stride(), shared.dtype):
                raise ValueError(
                    f"rank {self._group.me.rank}: within full_parameters(), parameter {name!r} became {tensor.dtype} "
                    f"of shape {list(tensor.shape)} and strides {list(tensor.stride())}; it was {shared.dtype} of "
                    f"shape {list(shared.shape)} and strides {list(shared.stride())}, and must not change. Change the "
                    "module before the SharedModelOptimizer is created"
                )

    def _first_difference(self, now: Sequence[object], before: Sequence[object]) -> str:
        return next(f"parameter {name!r}" for name, a, b in zip(self._names, now, before, strict=True) if a != b)


def private_parameters_of(module: nn.Module) -> AbstractContextManager[None]:
    """Returns `SharedParameters.private` for a module, or a context that does nothing if its parameters are not shared.

    All ranks must enter the context.
    """
    known = _of_modules.get(module)
    return nullcontext() if known is None else known.private()


def _torn_reason(group: ProcessGroup, how: str) -> str:
    return f"rank {group.me.rank}: a step of the SharedModelOptimizer ended with {how}. {_TORN}"


def is_shared(module: nn.Module) -> bool:
    """Returns True if the ranks on a host share the module's parameters."""
    return module in _of_modules


def named_with(module: nn.Module, others: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the module's parameters, and tensors in `others` that are outside the module, by name."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters())
    known = {id(param) for param in named.values()}
    outside = [param for param in others if id(param) not in known]
    return named | {f"parameter {index} outside the module": param for index, param in enumerate(outside)}


def unshareable_reason(module: nn.Module, named: Mapping[str, torch.Tensor]) -> Exception | None:
    """Returns the error that prevents the parameters from being shared, or None."""
    for name in collect_tracked(module).sparse:
        return ValueError(f"{name!r} has sparse gradients, which cannot be divided into slices; use sparse=False")
    ends: list[tuple[int, int, str]] = []
    for name, param in named.items():
        if nn.parameter.is_lazy(param):
            return ValueError(f"{name!r} has no shape yet; call the module once, then create the SharedModelOptimizer")
        if not param.is_cpu:
            return ValueError(f"{name!r} is on {param.device}; a host's ranks share only memory of CPU tensors")
        if not is_dense(param):
            return ValueError(
                f"{name!r} has strides {list(param.stride())} for the shape {list(param.shape)}, which leave gaps or "
                "overlap; make it contiguous"
            )
        ends.append((param.data_ptr(), param.data_ptr() + param.nbytes, name))
    ends.sort()
    for (_, stop, name), (start, _, other) in pairwise(ends):
        if start < stop:
            return ValueError(
                f"parameters {name!r} and {other!r} are different tensors in the same memory, which would be updated "
                "twice; tie layers by giving them one nn.Parameter"
            )
    return None


def _lay_out(params: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Returns the offset of each parameter in the shared memory and the size of the memory, in bytes."""
    offsets, nbytes = [], 0
    for param in params:
        offsets.append(nbytes)
        nbytes += -(-param.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, nbytes
