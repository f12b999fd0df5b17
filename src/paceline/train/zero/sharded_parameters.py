"""ShardedParameters: parameters that only their owners hold, except while a layer needs them (ZeRO stage 3).

A layer's parameters are gathered from their owners before its forward pass and again before its backward pass, and are
freed after each. Autograd saves views of the parameters' storage for backward. The same storage is therefore freed and
later refilled, so the views become valid again. A freed parameter has no elements, so code that reads it raises an
error instead of accessing freed memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.comm.group.eager import eager
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import Work
from paceline.errors import CollectiveMismatchError
from paceline.train.autograd_graph import BackwardEnd, find_tensors, in_backward
from paceline.train.zero.shards import Shard, flat


@dataclass(frozen=True, eq=False)
class Unit:
    """A module and the parameters that must be present while its forward or backward pass runs."""

    name: str
    module: nn.Module
    params: tuple[torch.Tensor, ...]


def find_units(module: nn.Module, params: Collection[torch.Tensor]) -> list[Unit]:
    """Divides a model into units: entries of `nn.Sequential`, `nn.ModuleList` and `nn.ModuleDict`, and the remainder.

    These entries are usually the layers of a model, which run sequentially. A nested unit's parameters do not belong to
    the outer unit. The unit for the whole module contains parameters outside all layers and parameters that several
    layers share, so they are available whenever code may read them. Parameters that are not in `params` are ignored.
    """
    wanted = {id(param) for param in params}
    layers: dict[int, tuple[str, nn.Module]] = {}
    for name, container in module.named_modules():
        if isinstance(container, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            for child, layer in container.named_children():
                if not isinstance(layer, (nn.ModuleList, nn.ModuleDict)):  # these containers lack `forward`
                    layers.setdefault(id(layer), (f"{name}.{child}".lstrip("."), layer))
    layers.pop(id(module), None)

    homes: dict[int, set[int]] = {}
    found: dict[int, torch.Tensor] = {}

    def visit(current: nn.Module, home: int) -> None:
        home = id(current) if id(current) in layers else home
        for param in current.parameters(recurse=False):
            if id(param) in wanted:
                homes.setdefault(id(param), set()).add(home)
                found[id(param)] = param
        for part in current.children():
            visit(part, home)

    visit(module, id(module))
    members: dict[int, list[torch.Tensor]] = {home: [] for home in layers}
    members[id(module)] = []
    for key, param in found.items():
        units = homes[key]
        members[min(units) if len(units) == 1 else id(module)].append(param)
    layers[id(module)] = ("", module)
    return [Unit(*layers[home], tuple(members[home])) for home in members if members[home]]


def names_of(params: Sequence[torch.Tensor], module: nn.Module | None) -> list[str]:
    """Returns the parameters' names in the module, or numbered names for parameters outside the module."""
    known = {} if module is None else {id(param): name for name, param in module.named_parameters()}
    return [known.get(id(param), f"parameter {index}") for index, param in enumerate(params)]


class LayerOrder:
    """Predicts the next layer to run: the layer that followed the current layer the last time that it ran.

    >>> order = LayerOrder()
    >>> [order.visit(layer) for layer in (0, 1, 2)]
    [None, None, None]
    >>> [order.visit(layer) for layer in (0, 1, 2)]
    [1, 2, None]
    """

    def __init__(self) -> None:
        self._after: dict[int, int] = {}
        self._visited: set[int] = set()
        self._latest: int | None = None

    def visit(self, layer: int) -> int | None:
        """Records that a layer runs; returns the predicted next layer or None. A repeated layer starts a new pass."""
        if layer in self._visited:
            self._visited.clear()
            self._latest = None
        if self._latest is not None:
            self._after[self._latest] = layer
        self._visited.add(layer)
        self._latest = layer
        return self._after.get(layer)


@dataclass(frozen=True)
class _Flight:
    """A gather in progress: the unit numbers received from other ranks for comparison, and the calls in flight."""

    sent_units: dict[int, torch.Tensor]
    works: list[Work]


class ShardedParameters:
    """Gathers and frees the parameters of `units`.

    Args:
        units: the units, which must be the same on every rank. The parameters of a unit are gathered together.
        shards: the shards of each parameter, by the parameter's `id`.
        group: the process group of the ranks.
        ends: the object that runs callbacks at the end of a backward pass.
        ahead: whether to prefetch, on the group's progress thread, the unit that is predicted to run next.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        shards: Mapping[int, Sequence[Shard]],
        group: ProcessGroup,
        ends: BackwardEnd,
        *,
        ahead: bool,
    ) -> None:
        self._units = list(units)
        self._shards = shards
        self._group = group
        self._ends = ends
        self._present = [True] * len(units)
        self._wholes = [[_own_storage(param) for param in unit.params] for unit in units]
        self._keep_runs()
        self._pinned = False
        self._ahead = ahead
        self._order_in_forward, self._order_in_backward = LayerOrder(), LayerOrder()
        self._flying: dict[int, _Flight] = {}
        self._handles: list[RemovableHandle] = []
        for number, unit in enumerate(units):
            self._handles.append(unit.module.register_forward_pre_hook(partial(self._before_forward, number)))
            self._handles.append(unit.module.register_forward_hook(partial(self._after_forward, number)))
        ends.callbacks.append(self.free_all)
        self.free_all()

    def close(self) -> None:
        """Restores all parameters on every rank, and removes the hooks; idempotent."""
        self._gather_all()
        for _, _, shard in self._runs():
            shard.follow()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.free_all in self._ends.callbacks:
            self._ends.callbacks.remove(self.free_all)

    @contextmanager
    def all_present(self) -> Iterator[None]:
        """Returns a context in which all parameters are present on every rank."""
        self._gather_all()
        self._pinned = True
        try:
            yield
        finally:
            self._pinned = False
            self._keep_runs()
            self.free_all()

    def shards_of(self, param: torch.Tensor) -> Sequence[Shard] | None:
        """Returns the shards of a freed parameter, or None if the parameter is present on every rank."""
        return None if self._pinned else self._shards.get(id(param))

    @staticmethod
    def own_run(shard: Shard) -> torch.Tensor | None:
        """Returns this rank's slice of a freed parameter, or None if another rank owns it."""
        if not shard.is_mine or shard.updated is None:
            return None
        return shard.param.data if shard.is_whole else shard.updated.data

    def refresh(self) -> None:
        """Gathers the parameters again after an optimizer step within `all_present`."""
        if self._pinned:
            self._present = [False] * len(self._units)
            self._gather_all()

    def free(self, number: int) -> None:
        """Frees a unit's parameters, except parameters that this rank owns entirely."""
        if number in self._flying:
            self._arrive(number)  # completes a prefetch whose prediction was wrong
        if self._pinned or not self._present[number]:
            return
        self._present[number] = False
        for param, whole in zip(self._units[number].params, self._wholes[number], strict=True):
            if not self._stays(param):
                whole.untyped_storage().resize_(0)
                param.data = whole.new_empty(0)

    def free_all(self) -> None:
        """Frees all parameters, except parameters that this rank owns entirely."""
        for number in range(len(self._units)):
            self.free(number)

    def _gather_all(self) -> None:
        for number in range(len(self._units)):
            self._gather_if_absent(number)

    def _gather(self, number: int) -> None:
        if self._present[number]:
            return
        self._gather_if_absent(number)
        if self._ahead:
            follower = (self._order_in_backward if in_backward() else self._order_in_forward).visit(number)
            if follower is not None and not self._present[follower] and follower not in self._flying:
                self._start(follower, async_op=True)

    def _gather_if_absent(self, number: int) -> None:
        if not self._present[number]:
            if number not in self._flying:
                self._start(number, async_op=False)
            self._arrive(number)

    def _start(self, number: int, async_op: bool) -> None:
        parts: dict[int, list[torch.Tensor]] = {}
        for param, whole in zip(self._units[number].params, self._wholes[number], strict=True):
            if not self._stays(param):
                whole.untyped_storage().resize_(_nbytes(whole))
            for shard in self._shards[id(param)]:
                if shard.is_mine and not shard.is_whole and shard.updated is not None:
                    shard.run(whole).copy_(shard.updated.detach())
                start, stop, owner = shard.part
                parts.setdefault(owner, []).append(_bytes_of(whole)[start:stop])
        owners = sorted(parts)
        if all(part.is_cpu for owner in owners for part in parts[owner]):
            sent_units = {owner: torch.tensor([number], device="cpu") for owner in owners}
            messages = {owner: [unit.view(torch.uint8), *parts[owner]] for owner, unit in sent_units.items()}
            works = []
        else:
            # Unit numbers are exchanged on the CPU, because reading from a device waits for all work enqueued there.
            own = torch.tensor([number], device="cpu")
            sent_units = {rank: torch.empty_like(own) for rank in range(self._group.size())}
            messages = parts
            works = [self._group.all_gather(list(sent_units.values()), own, async_op=async_op)]
        works += [self._group.broadcast(messages[owner], owner, async_op=async_op) for owner in owners]
        self._flying[number] = _Flight(sent_units, [work for work in works if work is not None])

    def _arrive(self, number: int) -> None:
        flight = self._flying.pop(number)
        for work in flight.works:
            work.wait()
        self._present[number] = True
        for param, whole in zip(self._units[number].params, self._wholes[number], strict=True):
            if not self._stays(param):
                param.data = whole
        # other ranks need this rank's data even if this rank raises an error
        for owner, unit in flight.sent_units.items():
            if (other := int(unit)) != number:
                ranks, names = self._group.ranks, [unit.name or "the module itself" for unit in self._units]
                raise CollectiveMismatchError(
                    f"rank {ranks[self._group.rank()]} runs layer {names[number]!r} while rank {ranks[owner]} runs "
                    f"{names[other]!r}. With stage=3 every rank must run the same layers in the same order"
                )

    @eager
    def _before_forward(self, number: int, module: nn.Module, inputs: object) -> None:
        self._gather(number)
        if torch.is_grad_enabled() and not self._is_trained(number):
            # No gradients are computed for the unit's parameters, so the gradients of the inputs mark the end of the
            # unit's backward pass.
            for tensor in find_tensors(inputs):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._after_backward, number))

    @eager
    def _after_forward(self, number: int, module: nn.Module, inputs: object, output: object) -> None:
        if torch.is_grad_enabled():
            outputs = [tensor for tensor in find_tensors(output) if tensor.requires_grad]
            for tensor in outputs:
                tensor.register_hook(partial(self._before_backward, number))
            if not outputs and self._is_trained(number):
                return  # without a hook before its backward pass, the unit must stay present
        if not in_backward():  # a checkpointed layer is recomputed in backward, and its own backward pass follows
            self.free(number)

    @eager
    def _before_backward(self, number: int, _: torch.Tensor) -> None:
        self._ends.begin()
        self._gather(number)

    @eager
    def _after_backward(self, number: int, _: torch.Tensor) -> None:
        self.free(number)

    def _stays(self, param: torch.Tensor) -> bool:
        """Returns True if this rank owns the whole parameter."""
        first = self._shards[id(param)][0]
        return first.is_whole and first.is_mine

    def _runs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, Shard]]:
        """Yields, for each run that this rank owns, the whole parameter's data, the updated run and the shard."""
        for unit, wholes in zip(self._units, self._wholes, strict=True):
            for param, whole in zip(unit.params, wholes, strict=True):
                for shard in self._shards[id(param)]:
                    if shard.is_mine and not shard.is_whole and shard.updated is not None:
                        yield whole, shard.updated, shard

    def _keep_runs(self) -> None:
        """Copies this rank's runs to separate memory, because the whole parameters will be freed."""
        for whole, updated, shard in self._runs():
            updated.data = shard.run(whole).clone()

    def _is_trained(self, number: int) -> bool:
        return any(param.requires_grad for param in self._units[number].params)


def sharded_parameters_of(module: nn.Module) -> ShardedParameters | None:
    """Returns the ShardedParameters that manages a module, or None if its parameters are not sharded."""
    for submodule in module.modules():
        for hook in submodule._forward_pre_hooks.values():
            owner = getattr(getattr(hook, "func", None), "__self__", None)
            if isinstance(owner, ShardedParameters):
                return owner
    return None


def _own_storage(param: torch.Tensor) -> torch.Tensor:
    """Returns a parameter's data; first moves the data to a storage of its own if necessary."""
    data = param.data
    storage = data.untyped_storage()
    if data.storage_offset() or storage.nbytes() != _nbytes(data) or not storage.resizable():
        data = param.data = data.clone()
    return data


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor's memory as a flat uint8 view, which can be sent regardless of layout and dtype."""
    return flat(tensor).view(torch.uint8)
