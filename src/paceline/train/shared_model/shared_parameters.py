"""Parameters in memory that all ranks of a host map, and what keeps them from being written to at the wrong time.

Nobody may write to them while a rank may read them, which is always but within `updating`: between the first call of
a step, which ends when all ranks have made it, and the barrier at its end. Everything else that writes, such as
`load_state_dict`, does so within `private`, to copies that a rank has for itself.

Keeps half-updated parameters from being used or saved as if they were whole.
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
    """A hook of a module that raises an error while `reason` says why its parameters are not whole.

    Copies of the module, which have parameters of their own, get a guard of their own without a reason.
    """

    def __init__(self) -> None:
        self.reason: str | None = None

    def __call__(self, *_: object) -> None:
        """Raises RuntimeError if there is a reason."""
        if self.reason is not None:
            raise RuntimeError(self.reason)

    def __reduce__(self) -> tuple[type[TornGuard], tuple[()]]:
        return TornGuard, ()

    def watch(self, module: nn.Module) -> None:
        """Makes forwards and `state_dict` of the module raise while there is a reason."""
        module.register_forward_pre_hook(self)
        module.register_state_dict_pre_hook(self)


_version = attrgetter("_version")
_of_modules: weakref.WeakKeyDictionary[nn.Module, SharedParameters] = weakref.WeakKeyDictionary()


_TORN = (
    "The parameters that the ranks of this host share are therefore updated only in part, and are those of no step; "
    "load a checkpoint in a new group of ranks"
)


class SharedParameters:
    """Puts parameters into memory that the ranks of a host share.

    Args:
        group: all ranks, of this host and others.
        ranks: those of this host.
        module: the module that has the parameters.
    """

    @classmethod
    def of(cls, module: nn.Module, group: ProcessGroup, ranks: HostRanks) -> SharedParameters:
        """Returns the object of this module, which several optimizers may have for different parameters."""
        known = _of_modules.get(module)
        if known is None or known._group is not group:
            known = _of_modules[module] = cls(group, ranks, module)
        return known

    def __init__(self, group: ProcessGroup, ranks: HostRanks, module: nn.Module) -> None:
        self._group = group
        self._ranks = ranks
        self._params: list[torch.Tensor] = []
        self._names: list[str] = []
        self._shared: list[torch.Tensor] = []  # what the parameters' data is, but within `private`
        self._is_private = False
        self._torn = TornGuard()
        self._torn.watch(module)
        self.accept()

    def add(self, named: Mapping[str, torch.Tensor]) -> None:
        """Moves those parameters that are not there yet, which are the same on all ranks; every rank calls this."""
        self._drop_replaced()
        known = {id(param) for param in self._params}
        new = {name: param for name, param in named.items() if id(param) not in known and param.numel()}
        offsets, nbytes = _lay_out(list(new.values()))
        if not new:
            return
        memory = share_on_host(self._group, nbytes)
        tensors = [
            _flat_as(memory.tensor(at, param.nbytes), param) for at, param in zip(offsets, new.values(), strict=True)
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
        """Takes the parameters as they are now for unchanged."""
        self._versions = list(map(_version, self._params))
        self._layouts = list(map(memory_layout, self._params))

    def changed(self) -> str | None:
        """Returns what somebody else has done to the parameters since `accept`, None if nothing is known."""
        if self._is_private:
            return "called step() within full_parameters()"
        if list(map(_version, self._params)) != self._versions:
            return f"wrote to {self._first(list(map(_version, self._params)), self._versions)}"
        if list(map(memory_layout, self._params)) != self._layouts:
            return f"replaced the memory of {self._first(list(map(memory_layout, self._params)), self._layouts)}"
        return None

    def require_whole(self) -> None:
        """Requires that no update of the parameters has ended half way.

        Raises:
            RuntimeError: one has.
        """
        self._torn()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Returns a context in which the ranks update the parameters; an error there leaves them unusable."""
        self._torn.reason = _torn_reason(self._group, "an error")
        try:
            yield
        except Exception as error:
            self._torn.reason = _torn_reason(self._group, f"{type(error).__name__} ({error})")
            if isinstance(error, CollectiveError):
                error.args = (f"{error}. {_TORN}", *error.args[1:])
            raise
        self._torn.reason = None
        count_writes(self._params)  # by whichever rank
        self.accept()

    @contextmanager
    def private(self) -> Iterator[None]:
        """Returns a context in which every rank has parameters of its own; those of rank 0 are shared at its end."""
        self.require_whole()
        own = [shared.clone() for shared in self._shared]
        self._bind(own)
        self._is_private = True
        try:
            yield
            own = [param.data for param in self._params]
            self._require_layout(own)
            broadcast_tensors(own, self._group)
            self._group.barrier()  # now all have entered this, so nobody reads the shared memory
            with self.updating():
                self._write(own, self._shared)
                self._group.barrier()
        finally:
            self._is_private = False
            self._bind(self._shared)
            self.accept()

    def _drop_replaced(self) -> None:
        """Forgets parameters that somebody has given other memory, as `module.to(dtype)` does, or a part of theirs."""
        pairs = zip(self._params, self._shared, strict=True)
        kept = [at for at, (param, shared) in enumerate(pairs) if memory_layout(param) == memory_layout(shared)]
        self._params = [self._params[at] for at in kept]
        self._names = [self._names[at] for at in kept]
        self._shared = [self._shared[at] for at in kept]

    def _bind(self, tensors: Sequence[torch.Tensor]) -> None:
        for param, tensor in zip(self._params, tensors, strict=True):
            param.data = tensor

    def _write(self, values: Sequence[torch.Tensor], shared: Sequence[torch.Tensor]) -> None:
        """Copies this rank's part of the values, which all ranks of the host have, to the shared memory."""
        here = self._ranks.here
        part, parts = here.index(self._ranks.rank), len(here)
        for value, tensor in zip(values, shared, strict=True):
            first, stop = (tensor.numel() * at // parts for at in (part, part + 1))
            flat(tensor)[first:stop].copy_(flat(value)[first:stop])

    def _require_layout(self, tensors: Sequence[torch.Tensor]) -> None:
        for name, tensor, shared in zip(self._names, tensors, self._shared, strict=True):
            if (tensor.shape, tensor.stride(), tensor.dtype) != (shared.shape, shared.stride(), shared.dtype):
                raise ValueError(
                    f"rank {self._group.me.rank}: within full_parameters(), parameter {name!r} became {tensor.dtype} "
                    f"of shape {list(tensor.shape)} and strides {list(tensor.stride())}; it was {shared.dtype} of "
                    f"shape {list(shared.shape)} and strides {list(shared.stride())}, and must stay so. Change the "
                    "module before the SharedModelOptimizer is made"
                )

    def _first(self, now: Sequence[object], before: Sequence[object]) -> str:
        return next(f"parameter {name!r}" for name, a, b in zip(self._names, now, before, strict=True) if a != b)


def private_parameters_of(module: nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which every rank has parameters of its own; one without effect if they are not shared.

    Every rank enters it; see `SharedParameters.private`.
    """
    known = _of_modules.get(module)
    return nullcontext() if known is None else known.private()


def _torn_reason(group: ProcessGroup, how: str) -> str:
    return f"rank {group.me.rank}: a step of the SharedModelOptimizer ended with {how}. {_TORN}"


def is_shared(module: nn.Module) -> bool:
    """Returns whether the ranks of a host share the parameters of the module."""
    return module in _of_modules


def named_with(module: nn.Module, others: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the parameters of the module, and those others that are not among them, by name."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters())
    known = {id(param) for param in named.values()}
    outside = [param for param in others if id(param) not in known]
    return named | {f"parameter {at} outside the module": param for at, param in enumerate(outside)}


def unshareable_reason(module: nn.Module, named: Mapping[str, torch.Tensor]) -> Exception | None:
    """Returns why these parameters, most of which are the module's, cannot be shared, None if they can."""
    for name in collect_tracked(module).sparse:
        return ValueError(f"{name!r} has sparse gradients, of which no rank can own a slice; use sparse=False")
    ends: list[tuple[int, int, str]] = []
    for name, param in named.items():
        if nn.parameter.is_lazy(param):
            return ValueError(f"{name!r} has no shape yet; call the module once, then make the SharedModelOptimizer")
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
    """Returns where each parameter lies in the memory, and how much memory that takes in bytes."""
    offsets, at = [], 0
    for param in params:
        offsets.append(at)
        at += -(-param.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, at


def _flat_as(memory: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    return memory.view(param.dtype).as_strided(param.shape, param.stride())
