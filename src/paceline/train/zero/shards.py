"""Shards: whole parameters or runs of consecutive elements, each updated by one rank, and their assignment to ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from paceline.comm.engine.adapters.device_streams import record_current
from paceline.comm.group.buffers import is_plain
from paceline.comm.group.process_group import ProcessGroup
from paceline.train.lion import Lion
from paceline.train.module_tensors import by_device, byte_views

ALIGNMENT_BYTES = 256  # parameters are cut at multiples of this, which suits all dtypes, cache lines and SIMD vectors
_UNEVEN = 0.02  # the fraction by which a rank may exceed an even share before a parameter is cut

_ELEMENTWISE_IN_TORCH = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
_ELEMENTWISE = frozenset([Lion, *(getattr(torch.optim, name) for name in _ELEMENTWISE_IN_TORCH)])


class OwnedBytes(NamedTuple):
    """The bytes `[start, stop)` of a parameter, and the rank that updates them."""

    start: int
    stop: int
    owner: int


def is_elementwise(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Returns True if an optimizer is known to update elements independently, so that parameters may be cut.

    Only torch's own classes and `Lion` qualify, because a derived class may compute on whole parameters.
    """
    return optimizer_class in _ELEMENTWISE


def assign_to_ranks(sizes: Sequence[int], may_cut: Sequence[bool], loads: list[int]) -> list[list[OwnedBytes]]:
    """Assigns parameters, in descending order of size, to the least loaded rank; cuts parameters that do not fit.

    Without cuts, the largest load is at most 4/3 of the optimum (Graham 1969); torch uses the same method. If a
    parameter may be cut, the bytes beyond an even share are assigned to the next rank. This happens at most once per
    rank.

    Sizes and loads are in bytes. `loads` contains the bytes already assigned to each rank, and is updated in place.
    Returns the parts of each parameter, in order.

    >>> assign_to_ranks([256, 1280, 512], [True] * 3, loads := [0, 256]), loads
    ([[OwnedBytes(start=0, stop=256, owner=1)], [OwnedBytes(start=0, stop=1280, owner=0)], \
[OwnedBytes(start=0, stop=512, owner=1)]], [1280, 1024])
    >>> assign_to_ranks([1024], [True], loads := [0, 0])
    [[OwnedBytes(start=0, stop=512, owner=0), OwnedBytes(start=512, stop=1024, owner=1)]]
    """
    even = -(-(sum(loads) + sum(sizes)) // len(loads))
    parts: list[list[OwnedBytes]] = [[] for _ in sizes]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        start, stop = 0, sizes[index]
        while start < stop or not parts[index]:
            rank = loads.index(min(loads))
            room = -((loads[rank] - even) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # rounded up to the alignment
            fits = loads[rank] + stop - start <= even * (1 + _UNEVEN)
            end = stop if fits or room <= 0 or not may_cut[index] else min(stop, start + room)
            parts[index].append(OwnedBytes(start, end, rank))
            loads[rank] += end - start
            start = end
    return parts


class Shard:
    """The part of `param` that one rank updates: the whole parameter, or a run of elements in memory order.

    For a whole parameter, `updated` is the parameter itself. For a run, `updated` is a one-dimensional tensor that
    shares the parameter's memory on the owner, and None on other ranks. The inner optimizer updates `target`, which is
    either `updated` or the higher-precision copy `master`. In the latter case, `updated` is set to the rounded copy. If
    the copy is in host memory and the parameter is on a device, values are transferred through `pinned`, a page-locked
    tensor with the layout and dtype of `updated`.
    """

    master: torch.Tensor | None = None
    pinned: torch.Tensor | None = None

    def __init__(self, param: torch.Tensor, part: OwnedBytes, rank: int) -> None:
        self.param = param
        self.part = part
        self.owner = part.owner
        self.is_mine = part.owner == rank
        self.is_whole = part.stop - part.start == param.nbytes
        self.shape, self.strides = param.shape, param.stride()  # a freed parameter loses its shape and strides
        self._first, self._stop = part.start // param.element_size(), part.stop // param.element_size()
        self.updated: torch.Tensor | None = None
        if self.is_whole:
            self.updated = param
        elif self.is_mine:
            self.updated = nn.Parameter(self.run(param.data), param.requires_grad)

    @property
    def target(self) -> torch.Tensor | None:
        """The tensor that the inner optimizer updates."""
        return self.updated if self.master is None else self.master

    @property
    def run_shape(self) -> torch.Size:
        """The shape of `updated`."""
        return self.shape if self.is_whole else torch.Size([self._stop - self._first])

    @property
    def elements(self) -> tuple[int, int]:
        """The range `[first, stop)` of the shard's elements in memory order."""
        return self._first, self._stop

    @property
    def is_first_part(self) -> bool:
        """Whether this shard contains the parameter's first elements."""
        return self._first == 0

    def run(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a view of this shard's elements in a tensor with the parameter's layout."""
        return tensor if self.is_whole else flat(tensor)[self._first : self._stop]

    def run_of_any(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this shard's elements in a tensor with the parameter's shape; copies the tensor if layouts differ."""
        return tensor if self.is_whole else self.run(self.with_layout(tensor).detach())

    def with_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """Converts a tensor with the parameter's shape to the parameter's layout; copies it if layouts differ."""
        has_layout = tensor.layout is torch.strided and tensor.stride() == self.strides
        if has_layout and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        return torch.empty_strided(self.shape, self.strides, dtype=tensor.dtype, device=tensor.device).copy_(
            tensor.to_dense()
        )

    def zeros(self) -> torch.Tensor:
        """Returns zeros with the parameter's layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.param.dtype, device=self.param.device).zero_()

    def follow(self) -> None:
        """Rebinds `updated` to the parameter's current memory."""
        if self.is_mine and not self.is_whole:
            if self.param.shape != self.shape or self.param.stride() != self.strides:
                raise RuntimeError(
                    f"a parameter had the shape {list(self.shape)} and the strides {list(self.strides)} when the "
                    f"ZeroRedundancyOptimizer was created, but has the shape {list(self.param.shape)} and the strides "
                    f"{list(self.param.stride())} now. Change the module first, for example with module.to(), and "
                    "create the optimizer afterwards"
                )
            assert self.updated is not None
            self.updated.data = self.run(self.param.data)

    def beside_master(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor with the layout of `updated` to the device of the master copy.

        A copy to `pinned` may still be in progress; `_beside_masters` waits for it. The values must be read before the
        next call to this method.
        """
        assert self.master is not None
        if self.pinned is None or tensor.is_cpu or tensor.dtype != self.pinned.dtype:
            return tensor.detach().to(self.master.device)
        return self.pinned.copy_(tensor.detach(), non_blocking=True)

    @torch.no_grad()
    def take_to_master(self, gradient: torch.Tensor) -> None:
        """Accumulates a gradient returned by `beside_master` into the master copy's gradient, in the copy's dtype."""
        assert self.master is not None
        gradient = gradient.to(self.master.dtype, copy=gradient is self.pinned)
        self.master.grad = gradient if self.master.grad is None else self.master.grad.add_(gradient)

    @torch.no_grad()
    def refresh_master(self, updated: torch.Tensor) -> None:
        """Updates those elements of the master copy whose parameters have changed since `round_master`.

        For all other elements, the master copy keeps its full precision. `beside_master` has returned `updated`.
        """
        assert self.master is not None
        is_changed = self.master.to(updated.dtype).ne(updated)
        if not self.master.is_cpu or is_changed.any():  # `any` would synchronize with a device
            self.master.copy_(torch.where(is_changed, updated.to(self.master.dtype), self.master))

    @torch.no_grad()
    def round_master(self) -> None:
        """Writes the master copy, rounded to the parameter's dtype, to the parameter; clears the copy's gradient."""
        if self.master is not None and self.updated is not None:
            if self.pinned is None:
                self.updated.copy_(self.master)
            else:
                self.updated.copy_(self.pinned.copy_(self.master), non_blocking=True)
            self.master.grad = None

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Accumulates into the run's gradient, which does not share memory with the parameter's gradient."""
        assert self.updated is not None
        if self.updated.grad is None:
            self.updated.grad = gradient.detach().clone()
        else:
            self.updated.grad.add_(gradient)


class Shards:
    """The division of an optimizer's parameters into shards, which is the same on every rank."""

    def __init__(self, rank: int, size: int, cuts: bool) -> None:
        self.rank = rank
        self.cuts = cuts  # whether parameters may be cut
        # Frozen parameters have no optimizer state. Separate loads for them keep the division of the state even.
        self._loads = {True: [0] * size, False: [0] * size}
        self.by_param: list[list[Shard]] = []

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Adds a group's parameters; parameters that were added earlier keep their owners."""
        parts: dict[int, list[OwnedBytes]] = {}
        for trained, loads in self._loads.items():
            chosen = [param for param in params if param.requires_grad == trained]
            divided = assign_to_ranks([p.nbytes for p in chosen], [self.cuts and is_dense(p) for p in chosen], loads)
            parts.update((id(param), its_parts) for param, its_parts in zip(chosen, divided, strict=True))
        self.by_param += [[Shard(param, part, self.rank) for part in parts[id(param)]] for param in params]

    def all(self) -> list[Shard]:
        """Returns all shards; a shard's index in this list is its number."""
        return [shard for shards in self.by_param for shard in shards]

    def mine(self) -> list[Shard]:
        """Returns the shards that this rank updates."""
        return [shard for shard in self.all() if shard.is_mine]

    def mine_of(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the tensors that the inner optimizer updates for these parameters."""
        wanted = {id(param) for param in params}
        return [s.target for s in self.mine() if s.target is not None and id(s.param) in wanted]

    def follow(self) -> None:
        """Rebinds all runs to their parameters' current memory."""
        for shard in self.mine():
            shard.follow()

    def copy_from_owners(self, group: ProcessGroup) -> None:
        """Broadcasts updated shards from their owners to all ranks (stages 1 and 2)."""
        for owner in range(group.size()):
            _copy_from_owner([s.run(s.param.detach()) for s in self.all() if s.owner == owner], owner, group)

    def take_gradients(self, free: bool) -> None:
        """Sets the gradients of this rank's runs from the parameters' gradients.

        If `free` is True, gradients that this rank does not need are freed. Otherwise, the runs share their memory.
        """
        for shards in self.by_param:
            param = shards[0].param
            if param.grad is None or (shards[0].is_whole and (shards[0].is_mine or not free)):
                continue
            for shard in shards:
                if shard.is_mine and not shard.is_whole and shard.updated is not None:
                    run = shard.run_of_any(param.grad)
                    if free:
                        shard.add_gradient(run)
                    else:
                        shard.updated.grad = run
            if free:
                param.grad = None

    def take_to_masters(self) -> None:
        """Moves the gradients of shards with master copies to the master copies."""
        held = [(shard, updated.grad) for shard, updated in self._with_masters() if updated.grad is not None]
        for shard, gradient in _beside_masters(held):
            assert shard.updated is not None
            shard.updated.grad = None
            shard.take_to_master(gradient)

    def refresh_masters(self) -> None:
        """Updates the master copies with the parameter elements that have changed since the last step."""
        for shard, updated in _beside_masters(self._with_masters()):
            shard.refresh_master(updated)

    def _with_masters(self) -> list[tuple[Shard, torch.Tensor]]:
        """Returns this rank's shards that have master copies, each with its `updated`."""
        held = [(shard, shard.updated) for shard in self.mine() if shard.master is not None]
        return [(shard, updated) for shard, updated in held if updated is not None]

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients of the tensors that this rank's inner optimizer updates."""
        return [s.target.grad for s in self.mine() if s.target is not None and s.target.grad is not None]

    def forget_run_gradients(self, set_to_none: bool = True) -> None:
        """Clears the gradients of runs and master copies, but not those of whole parameters."""
        for shard in self.mine():
            if shard.master is not None:
                shard.master.grad = None
            if not shard.is_whole and shard.updated is not None and shard.updated.grad is not None:
                if set_to_none:
                    shard.updated.grad = None
                else:
                    shard.updated.grad.zero_()


def _copy_from_owner(tensors: list[torch.Tensor], owner: int, group: ProcessGroup) -> None:
    """Broadcasts all contiguous tensors on a device in one call, and each remaining tensor in its own call."""
    for plain in by_device([tensor for tensor in tensors if is_plain(tensor)]):
        group.broadcast(byte_views(plain), owner)
    for tensor in tensors:
        if not is_plain(tensor):
            group.broadcast(tensor.detach(), owner, any_order=True)


def _beside_masters(values: Iterable[tuple[Shard, torch.Tensor]]) -> list[tuple[Shard, torch.Tensor]]:
    """Copies each shard's tensor to the device of the shard's master copy, and waits until all copies are complete."""
    copies = [(shard, shard.beside_master(tensor)) for shard, tensor in values]
    for device in dict.fromkeys(shard.param.device for shard, _ in copies if shard.pinned is not None):
        record_current(device).wait()
    return copies


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a one-dimensional view of the elements in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(param: torch.Tensor) -> bool:
    """Returns True if a tensor's elements fill its memory without gaps, in any order."""
    return torch.empty_like(param, device="meta").stride() == param.stride()
