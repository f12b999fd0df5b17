"""Shards: whole parameters, or runs of their elements, each of which one rank updates.

Decides which rank updates which bytes of which parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from paceline.comm.group.buffers import is_plain
from paceline.comm.group.process_group import ProcessGroup
from paceline.train.lion import Lion
from paceline.train.module_tensors import byte_views

ALIGNMENT_BYTES = 256  # of cuts, so that they keep whole elements of every dtype, whole cache lines, and whole vectors
_UNEVEN = 0.02  # the fraction by which a rank may exceed an even share before a parameter is cut

_TORCHS = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
_ELEMENTWISE = frozenset([Lion, *(getattr(torch.optim, name) for name in _TORCHS)])


class OwnedBytes(NamedTuple):
    """The bytes of a parameter from `start` to before `stop`, and the rank that updates them."""

    start: int
    stop: int
    owner: int


def is_elementwise(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Returns whether the optimizer is known to update elements independently, so that parameters may be cut.

    Only torch's own classes and `Lion` are known; a class derived from them may look at a parameter as a whole.
    """
    return optimizer_class in _ELEMENTWISE


def assign_to_ranks(sizes: Sequence[int], may_cut: Sequence[bool], loads: list[int]) -> list[list[OwnedBytes]]:
    """Gives each parameter, largest first, to the rank that has least so far, and cuts those that exceed its share.

    Largest first is at most 4/3 of the best partition into whole parameters (Graham 1969), and is what torch does. The
    bytes of a parameter beyond an even share go to the next rank; that happens at most once for each rank.

    Args:
        sizes: bytes of each parameter.
        may_cut: for each parameter, whether it may be cut.
        loads: bytes that each rank has already; this function updates them.

    Returns:
        The parts of each parameter, in order.

    >>> assign_to_ranks([256, 1280, 512, 512], [True] * 4, loads := [0, 0]), loads
    ([[OwnedBytes(start=0, stop=256, owner=1)], [OwnedBytes(start=0, stop=1280, owner=0)], [OwnedBytes(start=0, stop=512, owner=1)], \
[OwnedBytes(start=0, stop=512, owner=1)]], [1280, 1280])
    >>> assign_to_ranks([1024], [True], loads := [0, 0])
    [[OwnedBytes(start=0, stop=512, owner=0), OwnedBytes(start=512, stop=1024, owner=1)]]
    """
    even = -(-(sum(loads) + sum(sizes)) // len(loads))
    parts: list[list[OwnedBytes]] = [[] for _ in sizes]
    for index in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        start, stop = 0, sizes[index]
        while start < stop or not parts[index]:
            rank = loads.index(min(loads))
            room = -((loads[rank] - even) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # rounded up
            fits = loads[rank] + stop - start <= even * (1 + _UNEVEN)
            end = stop if fits or room <= 0 or not may_cut[index] else min(stop, start + room)
            parts[index].append(OwnedBytes(start, end, rank))
            loads[rank] += end - start
            start = end
    return parts


class Shard:
    """The part of `param` that one rank updates: all of it, or a run of elements in the order of their memory.

    `updated` is the whole parameter, or, on the owner, a one-dimensional tensor for the run, which shares the
    parameter's memory; None for a run on other ranks. The inner optimizer gets `target`: that, or its copy `master`,
    from which `updated` is rounded.
    """

    master: torch.Tensor | None = None

    def __init__(self, param: torch.Tensor, part: OwnedBytes, rank: int) -> None:
        self.param = param
        self.part = part
        self.owner = part.owner
        self.is_mine = part.owner == rank
        self.is_whole = part.stop - part.start == param.nbytes
        self.shape, self.strides = param.shape, param.stride()  # needed even while the parameter is freed
        self._first, self._stop = part.start // param.element_size(), part.stop // param.element_size()
        self.updated: torch.Tensor | None = None
        if self.is_whole:
            self.updated = param
        elif self.is_mine:
            self.updated = nn.Parameter(self.run(param.data), param.requires_grad)

    @property
    def target(self) -> torch.Tensor | None:
        """What the inner optimizer updates."""
        return self.updated if self.master is None else self.master

    @property
    def run_shape(self) -> torch.Size:
        """The shape of `updated`."""
        return self.shape if self.is_whole else torch.Size([self._stop - self._first])

    @property
    def elements(self) -> tuple[int, int]:
        """The first element in the order of memory, and the one after the last."""
        return self._first, self._stop

    @property
    def is_first_part(self) -> bool:
        """Whether no other shard has earlier elements of the parameter."""
        return self._first == 0

    def run(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this shard's elements of a tensor with the parameter's layout; they share its memory."""
        return tensor if self.is_whole else flat(tensor)[self._first : self._stop]

    def run_of_any(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this shard's elements of any tensor of the parameter's shape; copies it if its layout differs."""
        return tensor if self.is_whole else self.run(self.with_layout(tensor).detach())

    def with_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns any tensor of the parameter's shape in the parameter's layout; copies it if its layout differs."""
        is_alike = tensor.layout is torch.strided and tensor.stride() == self.strides
        if is_alike and not tensor.is_conj() and not tensor.is_neg():
            return tensor
        return torch.empty_strided(self.shape, self.strides, dtype=tensor.dtype).copy_(tensor.to_dense())

    def zeros(self) -> torch.Tensor:
        """Returns zeros with the parameter's layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.param.dtype).zero_()

    def follow(self) -> None:
        """Makes `updated` share the memory that the parameter has now.

        Raises:
            RuntimeError: the parameter's layout has changed since the optimizer was made.
        """
        if self.is_mine and not self.is_whole:
            if self.param.shape != self.shape or self.param.stride() != self.strides:
                raise RuntimeError(
                    f"a parameter had the shape {list(self.shape)} and the strides {list(self.strides)} when the "
                    f"ZeroRedundancyOptimizer was made, and has the shape {list(self.param.shape)} and the strides "
                    f"{list(self.param.stride())} now. Change the module first, for example with module.to(), and make "
                    "the optimizer afterwards"
                )
            assert self.updated is not None
            self.updated.data = self.run(self.param.data)

    def take_to_master(self) -> None:
        """Moves the gradient to the copy that the inner optimizer updates, in its type."""
        if self.master is None or self.updated is None or self.updated.grad is None:
            return
        gradient = self.updated.grad.detach().to(self.master)
        self.updated.grad = None
        self.master.grad = gradient if self.master.grad is None else self.master.grad.add_(gradient)

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Takes over the elements of the parameter that others have changed since `round_master`, as by loading it.

        All other elements are what the copy rounds to, and it keeps its digits.
        """
        if self.master is None or self.updated is None:
            return
        updated = self.updated.detach().to(self.master.device)
        is_changed = self.master.to(updated.dtype).ne(updated)
        if is_changed.any():
            self.master.copy_(torch.where(is_changed, updated.to(self.master.dtype), self.master))

    @torch.no_grad()
    def round_master(self) -> None:
        """Makes the parameter what its copy rounds to; the gradient has been used up."""
        if self.master is not None and self.updated is not None:
            self.updated.copy_(self.master)
            self.master.grad = None

    def add_gradient(self, gradient: torch.Tensor) -> None:
        """Adds to the gradient of a run, which has its own memory."""
        assert self.updated is not None
        if self.updated.grad is None:
            self.updated.grad = gradient.detach().clone()
        else:
            self.updated.grad.add_(gradient)


class Shards:
    """The shards of an optimizer's parameters, which are the same on every rank.

    Args:
        rank: this rank.
        size: the number of ranks.
        cuts: whether parameters may be cut.
    """

    def __init__(self, rank: int, size: int, cuts: bool) -> None:
        self.rank = rank
        self.cuts = cuts
        # Frozen parameters, which have no state, are divided separately, so that the states are divided evenly.
        self._loads = {True: [0] * size, False: [0] * size}
        self.by_param: list[list[Shard]] = []

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Adds the parameters of a group; parameters that were added before keep their owners."""
        parts: dict[int, list[OwnedBytes]] = {}
        for trained, loads in self._loads.items():
            chosen = [param for param in params if param.requires_grad == trained]
            divided = assign_to_ranks([p.nbytes for p in chosen], [self.cuts and is_dense(p) for p in chosen], loads)
            parts.update((id(param), its_parts) for param, its_parts in zip(chosen, divided, strict=True))
        self.by_param += [[Shard(param, part, self.rank) for part in parts[id(param)]] for param in params]

    def all(self) -> list[Shard]:
        """Returns all shards; a shard's place in this list is its number."""
        return [shard for shards in self.by_param for shard in shards]

    def mine(self) -> list[Shard]:
        """Returns the shards that this rank updates."""
        return [shard for shard in self.all() if shard.is_mine]

    def mine_of(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what the inner optimizer updates for these parameters."""
        wanted = {id(param) for param in params}
        return [s.target for s in self.mine() if s.target is not None and id(s.param) in wanted]

    def follow(self) -> None:
        """Makes runs share the memory that their parameters have now."""
        for shard in self.mine():
            shard.follow()

    def copy_from_owners(self, group: ProcessGroup) -> None:
        """Copies to all ranks what each owner has updated (stages 1 and 2)."""
        for owner in range(group.size()):
            _copy_from_owner([s.run(s.param.detach()) for s in self.all() if s.owner == owner], owner, group)

    def take_gradients(self, free: bool) -> None:
        """Gives the runs that this rank updates their parts of the parameters' gradients.

        Args:
            free: free the gradients that this rank does not need; otherwise runs share the gradients' memory.
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

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients of what this rank updates."""
        return [s.target.grad for s in self.mine() if s.target is not None and s.target.grad is not None]

    def forget_run_gradients(self, set_to_none: bool = True) -> None:
        """Clears the gradients of runs and copies; those of whole parameters stay as they are."""
        for shard in self.mine():
            if shard.master is not None:
                shard.master.grad = None
            if not shard.is_whole and shard.updated is not None and shard.updated.grad is not None:
                if set_to_none:
                    shard.updated.grad = None
                else:
                    shard.updated.grad.zero_()


def _copy_from_owner(tensors: list[torch.Tensor], owner: int, group: ProcessGroup) -> None:
    """Copies all contiguous tensors in one call, whatever their types, and each of the others in a call of its own."""
    if plain := [tensor for tensor in tensors if is_plain(tensor)]:
        group.broadcast(byte_views(plain), owner)
    for tensor in tensors:
        if not is_plain(tensor):
            group.broadcast(tensor.detach(), owner, any_order=True)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements in the order of their memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(param: torch.Tensor) -> bool:
    """Returns whether the elements fill the tensor's memory without gaps, in some order."""
    return torch.empty_like(param, device="meta").stride() == param.stride()
