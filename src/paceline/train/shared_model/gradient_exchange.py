"""GradientExchange: averages gradients, one round at a time, on the ranks that own the corresponding slices.

Gradients are summed over the ranks on a host, and then over the ranks that own the same slice on different hosts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline import _core
from paceline.comm.engine.channel import ReduceOp
from paceline.comm.engine.native.engine import HostRanks
from paceline.comm.group.default import NonMember
from paceline.comm.group.host_memory import applies_updates, host_ranks
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.subgroups import split_group
from paceline.errors import and_more
from paceline.train.checks.finite_check import GradientCheck
from paceline.train.ddp.gradient_buckets import BucketGradients
from paceline.train.shared_model.shared_shards import ReadyRound, RoundLayout, SharedShards, lay_out


@dataclass(frozen=True)
class HostGroups:
    """The process groups that a rank uses."""

    whole: ProcessGroup  # of all ranks
    host: ProcessGroup  # of this host's ranks
    across: ProcessGroup | None  # of the ranks that own the same slice, one per host; None if there is only one host
    ranks: HostRanks  # this host's ranks, which share memory
    is_first: bool  # whether the first rank of `whole` is on this host


def groups_by_host(group: ProcessGroup) -> HostGroups:
    """Creates the groups for each host; every rank in `group` must call this function.

    Raises:
        ValueError: the group's engine does not use shared memory between the ranks on a host, or the hosts have
            different numbers of ranks; raised on every rank.
    """
    ranks = host_ranks(group)
    if ranks is None:
        raise ValueError(
            f"{group.me}: the group's backend is {group.backend!r}, which does not provide shared memory; a "
            "SharedModelOptimizer needs the engine 'paceline'"
        )
    from_all = {tuple(json.loads(data)) for data in group.all_gather_bytes(json.dumps(ranks.here).encode())}
    hosts = list(map(list, sorted(from_all)))
    if len(hosts) == 1:
        return HostGroups(group, group, None, ranks, True)
    sizes = list(map(len, hosts))
    if len(set(sizes)) > 1:
        raise ValueError(
            f"{group.me}: the hosts have {sizes} ranks; the slices that a rank owns must be the same on every host, so "
            "a SharedModelOptimizer needs hosts with the same number of ranks"
        )
    host = split_group(group, hosts, group_desc="ranks of this host, which share a model")
    across = split_group(group, list(map(list, zip(*hosts, strict=True))), group_desc="owners of a slice")
    assert not isinstance(host, NonMember)
    assert not isinstance(across, NonMember)
    return HostGroups(group, host, across, ranks, ranks.here == hosts[0])


class GradientExchange:
    """Averages gradients over all ranks, one round at a time.

    Args:
        shards: the slices that each rank owns. If they are cut, each round's averages are consumed before the next
            round starts, so that the next round may overwrite them.
        names: the names of the parameters, in the order of `shards.by_param`.
        groups: the process groups within and across hosts.
        check: a check of this rank's gradients before they are averaged, or None.
    """

    def __init__(
        self, shards: SharedShards, names: Sequence[str], groups: HostGroups, check: GradientCheck | None
    ) -> None:
        self._shards = shards
        self._params = [its_shards[0].param for its_shards in shards.by_param]
        self._names = list(names)
        self._groups = groups
        self._check = check
        self._averages = groups.across is None  # whether the reduction within the host computes averages
        self._applies_updates = shards.cuts and self._averages and applies_updates(groups.host)
        # - Values on which the ranks have agreed
        self._anywhere: list[bool] = []  # per parameter: whether any rank has a gradient
        self.idle = 0  # the number of ranks without inputs
        self.divides_by_active = False  # whether averages count only ranks with inputs
        # - This rank's gradients
        self._present: list[bool] = []  # per parameter: whether this rank has a gradient
        self._buckets: list[tuple[list[int], BucketGradients]] = []
        self._addresses: list[int] = []  # per parameter: the address of its gradient, or 0
        self._kept: list[torch.Tensor] = []
        self._source: list[tuple[torch.Tensor | None, int]] = []  # gradients that were averaged, and their versions
        # - Memory for the averages
        self._layouts: dict[tuple[bool, ...], RoundLayout] = {}
        self._current: RoundLayout | None = None  # the layout whose memory the shards' gradients use
        # Read in place of gradients that this rank does not have.
        self._zeros = torch.zeros(0, dtype=torch.uint8, device="cpu")

    def agree(self, changed: str | None, has_inputs: bool, needs_averages: bool) -> bool:
        """Waits until all ranks have entered their step, so that no rank is still reading parameters.

        `changed` describes a forbidden change to the parameters on this rank. A change on any rank raises RuntimeError
        on every rank.

        Returns:
            True if any rank's gradients are still to be averaged. In this case, the ranks have also exchanged
            information about which parameters have gradients.
        """
        present = [has_inputs and param.grad is not None for param in self._params]
        flags = [changed is not None, needs_averages, present != self._anywhere, not has_inputs]
        facts = torch.tensor(flags, dtype=torch.int64, device="cpu")
        self._groups.whole.all_reduce(facts)
        changes, needed, differ, self.idle = facts.tolist()
        if changes:
            self._raise_changed(changed)
        if needed:
            if differ:
                anywhere = torch.tensor(present, dtype=torch.uint8, device="cpu")
                self._groups.whole.all_reduce(anywhere, ReduceOp.MAX)
                self._anywhere = list(map(bool, anywhere.tolist()))
            self._collect(present)
        return bool(needed)

    def remember(self) -> None:
        """Records the current gradients as averaged."""
        self._source = self._gradients()

    def is_outdated(self) -> bool:
        """Returns True if the parameters' gradients differ from the tensors that `remember` recorded.

        Raises RuntimeError if an averaged gradient was modified.
        """
        now = self._gradients()
        for name, (gradient, version), (other, earlier) in zip(self._names, now, self._source, strict=True):
            if gradient is not None and gradient is other and version != earlier:
                raise RuntimeError(
                    f"{self._groups.whole.me}: the gradient of {name!r} was changed after clip_grad_norm_() or "
                    "GradScaler had averaged it over the ranks; the average would not have the change. Before step(), "
                    "param.grad is this rank's own gradient: clip with optimizer.clip_grad_norm_(), not with "
                    "torch.nn.utils, and call optimizer.zero_grad() before the next backward"
                )
        return any(gradient is not other for (gradient, _), (other, _) in zip(now, self._source, strict=True))

    def forget(self) -> None:
        """Discards the averages."""
        self._source = []

    def release(self) -> None:
        """Releases this rank's gradients, which have been averaged."""
        self._kept = []

    def _gradients(self) -> list[tuple[torch.Tensor | None, int]]:
        gradients = [param.grad for param in self._params]
        return [(gradient, -1 if gradient is None else gradient._version) for gradient in gradients]

    def rounds(self, whole: bool) -> Sequence[ReadyRound]:
        """Returns the rounds for this step, and sets the shards' gradients to views of the rounds' results.

        If `whole`, the results of all rounds are available at the same time.
        """
        whole = whole or not self._shards.cuts
        key = (whole, *self._anywhere)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= 8:  # limits the cache for models that skip random layers
                self._layouts.clear()
            layout = self._layouts[key] = lay_out(self._shards, self._anywhere, whole)
        if layout is not self._current:
            for shard in self._shards.mine():
                if shard.updated is not None:
                    shard.updated.grad = None
            for ready in layout.rounds:
                for updated, average in ready.averages:
                    updated.grad = average
            self._current = layout
        needed = layout.longest_padding
        if self._present != self._anywhere:
            needed = max(needed, layout.longest_run)
        if self._zeros.numel() < needed:
            self._zeros = torch.zeros(needed, dtype=torch.uint8, device="cpu")
        return layout.rounds

    @property
    def may_update(self) -> bool:
        """Whether the core can apply updates in this step, which requires sums within the host to be final."""
        return self._applies_updates and not (self.idle and self.divides_by_active)

    @torch.no_grad()
    def average(self, ready: ReadyRound, update: _core.Update | None, *, stores: bool = False) -> None:
        """Averages the gradients of a round; every rank must call this method.

        If `update` is given, the core applies it to this rank's averages, and they are stored only if `stores` is True.
        """
        if self._shards.cuts:
            self._reduce_scatter(ready, update, stores or update is None)
        else:
            self._reduce_to_owners(ready)
        if not self._averages:
            assert self._groups.across is not None
            self._groups.across.all_reduce(ready.sums)
            ready.sums.div_(self._groups.whole.size())
        if self.idle and self.divides_by_active:
            size = self._groups.whole.size()
            ready.sums.mul_(size / (size - self.idle))

    def first_active(self, has_inputs: bool) -> int:
        """Returns the first rank that has inputs; every rank must call this method."""
        from_all = self._groups.whole.all_gather_bytes(bytes([has_inputs]))
        return from_all.index(bytes([True]))

    def _reduce_scatter(self, ready: ReadyRound, update: _core.Update | None, stores: bool) -> None:
        zeros = self._zeros.data_ptr()
        inputs = [reads.pieces(self._addresses, zeros) for reads in ready.reads]
        outputs = [[ready.sums.data_ptr(), ready.sums.nbytes]] if stores else []
        self._groups.host.reduce_scatter_memory(
            inputs, outputs, self._kept, ready.dtype_code, ready.sums.numel(), self._op, update
        )

    def _reduce_to_owners(self, ready: ReadyRound) -> None:
        for owner, reads in enumerate(ready.reads):
            if not reads.params:
                continue
            gradients = [self._gradient(index) for index in reads.params]
            if owner == self._groups.host.rank():
                for (_, average), gradient in zip(ready.averages, gradients, strict=True):
                    average.copy_(gradient)
                gradients = [average for _, average in ready.averages]
            self._groups.host.reduce(gradients, owner, self._op, async_op=False)

    @property
    def _op(self) -> ReduceOp:
        return ReduceOp.AVG if self._averages else ReduceOp.SUM

    def _gradient(self, index: int) -> torch.Tensor:
        gradient = self._params[index].grad if self._present[index] else None
        shard = self._shards.by_param[index][0]
        return shard.zeros() if gradient is None else shard.with_layout(gradient)

    def _collect(self, present: list[bool]) -> None:
        """Collects the addresses of this rank's gradients."""
        if present != self._present:
            self._present = present
            self._buckets = []
            for dtype in dict.fromkeys(param.dtype for param in self._params):
                indices = [i for i, param in enumerate(self._params) if present[i] and param.dtype == dtype]
                if indices:
                    params = [param for i in indices if isinstance(param := self._params[i], nn.Parameter)]
                    assert len(params) == len(indices), "the optimizer has tensors that are not parameters"
                    self._buckets.append((indices, BucketGradients(params, [self._names[i] for i in indices])))
        self._addresses = [0] * len(self._params)
        self._kept = []
        for indices, bucket in self._buckets:
            memory = bucket.collect(copy_shared=False)
            assert memory is not None
            if self._check is not None:
                self._check.look(bucket.names, memory.tensors, memory.pieces, bucket.dtype_code)
            for index, address in zip(indices, memory.pieces[0::2], strict=True):
                self._addresses[index] = address
            self._kept += memory.tensors

    def _raise_changed(self, changed: str | None) -> None:
        group = self._groups.whole
        from_all = [json.loads(data) for data in group.all_gather_bytes(json.dumps(changed).encode())]
        changes = [f"rank {rank} {change}" for rank, change in zip(group.ranks, from_all, strict=True) if change]
        raise RuntimeError(
            f"{group.me}: since the last step, {and_more(changes, 4)}. The ranks of a host share the parameters, so "
            "whatever one writes to them the others read, even in the middle of a forward. Write to them, or load "
            "them, within `with optimizer.full_parameters():` on every rank"
        )
