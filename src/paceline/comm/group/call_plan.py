"""Plans for collectives: fully checked calls in the form that engines expect.

The functions take the group's `RankMap`, which also converts roots and peers to group ranks. They accept torch's
reductions and option objects (such as `AllreduceOptions`), and recognize these objects by their attributes, so they
work with every release of torch.

All functions raise:
    TypeError: a tensor's layout or dtype is not supported, or the reduction is not defined for its dtype.
    ValueError: tensors are missing, superfluous or inconsistent.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence, Sized
from datetime import timedelta
from itertools import chain
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, cast

import torch

from paceline import _core
from paceline.comm.engine.channel import DTYPE_CODES, NO_REDUCTION, CollectiveCall, PremulSum, ReduceOp, Reduction
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.group.buffers import Buffers, Tensors, as_list, count_elements, dtype_code
from paceline.comm.schedule.steps import Operation
from paceline.durations import Timeout
from paceline.errors import short_repr

if TYPE_CHECKING:
    from typing_extensions import TypeIs

CallPlan = tuple[CollectiveCall, Buffers]
"""A call and its `Buffers`, which copy results back to tensors that were replaced by copies."""


_MOST_TAG = 2**31 - 1  # the core's tags have 32 bits
_NOT_A_REDUCTION = "op must be a paceline.ReduceOp, a paceline.PremulSum or a torch.distributed.ReduceOp, not {}"
_UNSET = timedelta(0)

# Torch's reductions without a factor are looked up first, because most calls in torch programs use one of them.
_TORCHS_KIND: Any = getattr(getattr(torch.distributed, "ReduceOp", None), "RedOpType", None)

_BY_TORCHS_KIND: dict[object, ReduceOp] = {
    kind: ReduceOp[name]
    for name, kind in getattr(_TORCHS_KIND, "__members__", {}).items()
    if name in ReduceOp.__members__ and name != ReduceOp.PREMUL_SUM.name
}

_PREMUL_SUM = ReduceOp.PREMUL_SUM

# For each dtype that is not complex: the code of the dtype, and for each reduction its code, or -1 if the core cannot
# apply it to this dtype directly. The codes are plain integers, because enum members are slow to hash and to convert.
QUICK_CODES: dict[torch.dtype, tuple[int, list[int]]] = {
    dtype: (code, [int(op) if op is not _PREMUL_SUM and _core.reduces(code, op) else -1 for op in ReduceOp])
    for dtype, code in DTYPE_CODES.items()
    if not dtype.is_complex
}


class RankMap:
    """The ranks in a group, numbered by their positions in the group (group ranks) and in the default group (`ranks`).

    `group` describes the group in error messages.
    """

    def __init__(self, members: Sequence[RankIdentity], rank: int, group: str) -> None:
        self.members = tuple(members)
        self.ranks = [member.rank for member in members]
        self.size = len(members)
        self.rank = rank
        self.me = self.members[rank]
        self._group = group

    def __repr__(self) -> str:
        return self._group

    def root_rank(
        self, rank: int | None, group_rank: int | None, call: str, name: str, default: int | None = None
    ) -> int:
        """Returns the group rank of a root or peer given as `rank` (in the default group) or as `group_rank`."""
        if rank is not None and group_rank is not None:
            raise ValueError(f"{call}: {name} and group_{name} are mutually exclusive; pass one of them")
        if rank is not None:
            return self.group_rank_of(rank, call, name)
        if group_rank is None:
            group_rank = default
        if group_rank is None:
            raise ValueError(f"{call} needs {name} (a rank of the default group) or group_{name}")
        if not 0 <= group_rank < self.size:
            raise ValueError(f"{call}: group_{name} is {group_rank}; {self} has ranks 0 to {self.size - 1}")
        return group_rank

    def group_rank_of(self, rank: int, call: str, name: str) -> int:
        """Converts a rank in the default group to a group rank; `call` and `name` appear in error messages."""
        if rank not in self.ranks:
            if not hasattr(rank, "__index__"):
                raise TypeError(f"{call}: {name} is {short_repr(rank)} ({type(rank).__name__}); a rank is an integer")
            raise ValueError(f"{call}: {name} is {rank}, which is not in {self}; its members are {self.ranks}")
        return self.ranks.index(rank)

    def require_root(self, root: int, call: str) -> None:
        """Checks that `root` is a group rank."""
        if not 0 <= root < self.size:
            raise ValueError(
                f"rank {self.me.rank}: {call}: the root is group rank {root}; {self} has ranks 0 to {self.size - 1}"
            )

    def require_peer(self, peer: int, call: str, name: str) -> None:
        """Checks that `peer` is a rank in the group other than this rank."""
        if not 0 <= peer < self.size:
            raise ValueError(
                f"rank {self.me.rank}: {call}: {name} is group rank {peer}; {self} has ranks 0 to {self.size - 1}"
            )
        if peer == self.rank:
            raise ValueError(
                f"{call}: {name} is rank {self.ranks[peer]}, this one; a rank cannot send to itself; use tensor.copy_()"
            )


def plan_all_reduce(tensors: Tensors, op: Reduction, timeout_ns: int, any_order: bool = False) -> CallPlan:
    """Returns the plan for an all_reduce; see `Buffers` for `any_order`."""
    listed = as_list(tensors, "all_reduce")
    code, reduce_code, buffers = checked_reduction(listed, op, "all_reduce", any_order)
    count, outputs = count_elements(listed), [buffers.write(listed)]
    return CollectiveCall(Operation.ALL_REDUCE, code, reduce_code, -1, count, timeout_ns, [], outputs), buffers


def plan_broadcast(
    rank_map: RankMap, tensors: Tensors, root: int, timeout_ns: int, any_order: bool = False
) -> CallPlan:
    """Returns the plan for a broadcast from group rank `root`; see `Buffers` for `any_order`."""
    listed = as_list(tensors, "broadcast")
    code = dtype_code(listed, "broadcast")
    buffers = Buffers(any_order=any_order)
    if rank_map.rank == root:  # expanded tensors, for example, can be read but not written
        outputs = [buffers.read(listed)]
        buffers.written += listed
    else:
        outputs = [buffers.write(listed)]
    count = count_elements(listed)
    return CollectiveCall(Operation.BROADCAST, code, NO_REDUCTION, root, count, timeout_ns, [], outputs), buffers


def plan_reduce(rank_map: RankMap, tensors: Tensors, root: int, op: Reduction, timeout_ns: int) -> CallPlan:
    """Returns the plan for a reduce to group rank `root`."""
    listed = as_list(tensors, "reduce")
    code, reduce_code, buffers = checked_reduction(listed, op, "reduce")
    outputs = [buffers.write(listed) if rank_map.rank == root else buffers.read(listed)]
    count = count_elements(listed)
    return CollectiveCall(Operation.REDUCE, code, reduce_code, root, count, timeout_ns, [], outputs), buffers


def plan_all_gather(rank_map: RankMap, outputs: Sequence[Tensors], tensors: Tensors, timeout_ns: int) -> CallPlan:
    """Returns the plan for an all_gather, or for an all_to_all if the ranks' tensors differ in size."""
    return _plan_gather(Operation.ALL_GATHER, rank_map, outputs, tensors, -1, timeout_ns)


def plan_gather(
    rank_map: RankMap, outputs: Sequence[Tensors] | None, tensors: Tensors, root: int, timeout_ns: int
) -> CallPlan:
    """Returns the plan for a gather to group rank `root`; `outputs` is None or empty on other ranks."""
    if bool(outputs) != (rank_map.rank == root):
        raise ValueError(
            f"rank {rank_map.me.rank}: gather takes gather_list on the destination, rank {rank_map.ranks[root]}, "
            "and on no other rank"
        )
    return _plan_gather(Operation.GATHER, rank_map, outputs or [], tensors, root, timeout_ns)


def _plan_gather(
    operation: Operation, rank_map: RankMap, outputs: Sequence[Tensors], tensors: Tensors, root: int, timeout_ns: int
) -> CallPlan:
    name = str(operation)
    receives = operation is Operation.ALL_GATHER or rank_map.rank == root
    read = as_list(tensors, name)
    written = lists_by_rank(outputs, rank_map, name, "the list of outputs") if receives else []
    code = dtype_code([*read, *chain(*written)], name)
    count = count_elements(read)
    is_uneven = operation is Operation.ALL_GATHER and are_uneven(written, rank_map, name)
    (require_own_count if is_uneven else require_counts)(written, count, rank_map, name, "the list of outputs")
    buffers = Buffers()
    flat_inputs = [buffers.read(read)]
    if is_uneven:
        buffers.note = (
            "all_gather of tensors that differ in size is an all_to_all, in which all ranks pass the same sizes"
        )
        operation, count, dense = Operation.ALL_TO_ALL, 0, list(buffers.kept)
        flat_inputs += [buffers.read(dense) for _ in range(rank_map.size - 1)]
    flat_outputs = [buffers.write(part) for part in written]
    return CollectiveCall(operation, code, NO_REDUCTION, root, count, timeout_ns, flat_inputs, flat_outputs), buffers


def plan_reduce_scatter(
    rank_map: RankMap, output: Tensors, inputs: Sequence[Tensors], op: Reduction, timeout_ns: int
) -> CallPlan:
    """Returns the plan for a reduce_scatter."""
    written = as_list(output, "reduce_scatter")
    read = lists_by_rank(inputs, rank_map, "reduce_scatter", "input_list")
    code, reduce_code, buffers = checked_reduction([*written, *chain(*read)], op, "reduce_scatter")
    count = count_elements(written)
    require_counts(read, count, rank_map, "reduce_scatter", "input_list")
    flat_inputs = [buffers.read(part) for part in read]
    buffers.scale = None  # the factor applies only to the inputs
    flat_outputs = [buffers.write(written)]
    operation = Operation.REDUCE_SCATTER
    return CollectiveCall(operation, code, reduce_code, -1, count, timeout_ns, flat_inputs, flat_outputs), buffers


def plan_uneven_reduce_scatter(
    rank_map: RankMap, output: Tensors, inputs: Sequence[Tensors], op: Reduction, timeout_ns: int
) -> list[CallPlan]:
    """Returns plans for one reduce to each rank, which together perform a reduce_scatter with parts of different sizes.

    Copies this rank's part to `output`, where the reduce to this rank adds the parts of the other ranks.
    """
    written = as_list(output, "reduce_scatter")
    read = lists_by_rank(inputs, rank_map, "reduce_scatter", "input_list")
    checked_reduction([*written, *chain(*read)], op, "reduce_scatter")
    require_own_count(read, count_elements(written), rank_map, "reduce_scatter", "input_list")
    mine = rank_map.rank
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in read[mine]])
    for tensor, values in zip(written, flat.split([tensor.numel() for tensor in written]), strict=True):
        tensor.detach().copy_(values.view(tensor.shape))
    parts = [written if root == mine else part for root, part in enumerate(read)]
    plans = [plan_reduce(rank_map, part, root, op, timeout_ns) for root, part in enumerate(parts)]
    for _, buffers in plans:
        buffers.note = (
            "reduce_scatter of tensors that differ in size consists of a reduce to each rank, in which all ranks pass "
            "the same sizes"
        )
    return plans


def plan_scatter(
    rank_map: RankMap, output: Tensors, inputs: Sequence[Tensors] | None, root: int, timeout_ns: int
) -> CallPlan:
    """Returns the plan for a scatter from group rank `root`; `inputs` is None or empty on other ranks."""
    if bool(inputs) != (rank_map.rank == root):
        raise ValueError(
            f"rank {rank_map.me.rank}: scatter takes scatter_list on the source, rank {rank_map.ranks[root]}, "
            "and on no other rank"
        )
    written = as_list(output, "scatter")
    read = lists_by_rank(inputs, rank_map, "scatter", "scatter_list") if inputs else []
    code = dtype_code([*written, *chain(*read)], "scatter")
    count = count_elements(written)
    require_counts(read, count, rank_map, "scatter", "scatter_list")
    buffers = Buffers()
    flat_inputs, flat_outputs = [buffers.read(part) for part in read], [buffers.write(written)]
    operation = Operation.SCATTER
    return CollectiveCall(operation, code, NO_REDUCTION, root, count, timeout_ns, flat_inputs, flat_outputs), buffers


def plan_all_to_all(
    rank_map: RankMap, outputs: Sequence[Tensors], inputs: Sequence[Tensors], timeout_ns: int
) -> CallPlan:
    """Returns the plan for an all_to_all."""
    read = lists_by_rank(inputs, rank_map, "all_to_all", "input_tensor_list")
    written = lists_by_rank(outputs, rank_map, "all_to_all", "output_tensor_list")
    mine = rank_map.rank
    sent, received = count_elements(read[mine]), count_elements(written[mine])
    if sent != received:
        raise ValueError(
            f"rank {rank_map.me.rank}: all_to_all: this rank sends itself {sent} elements, but has room for {received} "
            f"elements from itself; entry {mine} must have the same size in the input and in the output"
        )
    code = dtype_code([*chain(*read, *written)], "all_to_all")
    buffers = Buffers()
    flat_inputs = [buffers.read(part) for part in read]
    flat_outputs = [buffers.write(part) for part in written]
    operation = Operation.ALL_TO_ALL
    return CollectiveCall(operation, code, NO_REDUCTION, -1, 0, timeout_ns, flat_inputs, flat_outputs), buffers


def plan_barrier(timeout_ns: int) -> CallPlan:
    """Returns the plan for a barrier."""
    return CollectiveCall(Operation.BARRIER, 0, NO_REDUCTION, -1, 0, timeout_ns, [], []), Buffers()


def checked_reduction(
    tensors: Sequence[torch.Tensor], op: Reduction, call: str, any_order: bool = False
) -> tuple[int, int, Buffers]:
    """Returns the codes of the dtype and the reduction, and empty buffers with the scale factor from `op`."""
    code = dtype_code(tensors, call)
    op = required_reduction(op)
    scale = op.factor if isinstance(op, PremulSum) else None
    reduce_code = ReduceOp.PREMUL_SUM if isinstance(op, PremulSum) else op
    if op is ReduceOp.PREMUL_SUM:
        raise TypeError(f"{call}: PREMUL_SUM needs a factor; pass paceline.PremulSum(factor)")
    # On other devices, the engine reports unsupported reductions.
    if not reduces(code, reduce_code) and all(tensor.is_cpu for tensor in tensors):
        dtype = tensors[0].dtype if tensors else torch.uint8
        raise TypeError(f"{call}: {reduce_code.name} is not defined for {dtype}; convert the tensor first")
    return code, reduce_code, Buffers(scale, any_order)


@functools.cache
def reduces(dtype: int, reduce_op: int) -> bool:
    """Returns True if the core implements the reduction for the dtype with the code `dtype`."""
    return _core.reduces(dtype, reduce_op)


def checked_tag(tag: int, call: str) -> int:
    """Returns `tag` if it is a non-negative integer of at most 31 bits."""
    if not hasattr(tag, "__index__"):
        raise TypeError(f"{call}: tag is {short_repr(tag)}; it must be an integer")
    if not 0 <= tag <= _MOST_TAG:
        raise ValueError(f"{call}: tag is {tag}; it must be from 0 to {_MOST_TAG}")
    return tag


def parts_by_rank(whole: torch.Tensor, count: int, rank_map: RankMap, call: str, name: str) -> list[torch.Tensor]:
    """Divides `whole`, which must be contiguous, into one-dimensional views of `count` elements, one for each rank."""
    if whole.numel() != count * rank_map.size:
        raise ValueError(
            f"rank {rank_map.me.rank}: {call}: {name} has {whole.numel()} elements; with {rank_map.size} ranks of "
            f"{count} elements it must have {count * rank_map.size}"
        )
    if not whole.is_contiguous():
        raise ValueError(f"rank {rank_map.me.rank}: {call}: {name} is not contiguous; pass {name}.contiguous()")
    flat = whole.detach().view(-1)
    return [flat[r * count : (r + 1) * count] for r in range(rank_map.size)]


def rows_by_rank(
    whole: torch.Tensor, sizes: Sequence[int] | None, rank_map: RankMap, call: str, name: str
) -> list[torch.Tensor]:
    """Divides `whole` along its first dimension. Rank r's part has `sizes[r]` rows; by default, all are equal."""
    if whole.dim() == 0:
        raise ValueError(
            f"rank {rank_map.me.rank}: {call}: {name} has no dimensions, and therefore no rows to divide among "
            f"{rank_map.size} ranks; add one: {name}.view(1)"
        )
    rows = whole.shape[0]
    if sizes is None:
        if rows % rank_map.size:
            raise ValueError(
                f"rank {rank_map.me.rank}: {call}: {name} has {rows} rows, which cannot be divided evenly among "
                f"{rank_map.size} ranks; pass {name}_split_sizes"
            )
        sizes = [rows // rank_map.size] * rank_map.size
    if len(sizes) != rank_map.size or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"rank {rank_map.me.rank}: {call}: {name}_split_sizes is {list(sizes)}; it needs {rank_map.size} with the "
            f"sum {rows}, none of them negative"
        )
    return list(whole.detach().split(list(sizes)))


def split_sizes(sizes: Iterable[SupportsIndex] | None, call: str, name: str) -> list[int] | None:
    """Converts an iterable of integers, such as a NumPy array, to a list; returns None if it is empty or None."""
    if sizes is None:
        return None
    try:
        return [index(size) for size in sizes] or None
    except TypeError:
        raise TypeError(
            f"{call}: {name} is {short_repr(sizes)}; it must be a list of integers, one for each rank, or None"
        ) from None


def lists_by_rank(lists: Sequence[Tensors], rank_map: RankMap, call: str, argument: str) -> list[list[torch.Tensor]]:
    """Returns the entries of `lists`, one for each rank, as lists of tensors."""
    if not isinstance(lists, Sized):
        raise TypeError(
            f"{call}: {argument} is {short_repr(lists)}; it must be a list with one entry for each of the "
            f"{rank_map.size} ranks"
        )
    if isinstance(lists, torch.Tensor) or len(lists) != rank_map.size:
        seen = type(lists).__name__ if isinstance(lists, torch.Tensor) else f"{len(lists)} entries"
        raise ValueError(f"{call}: {argument} needs one entry for each of the {rank_map.size} ranks, not {seen}")
    return [as_list(entry, f"{call}: {argument}") for entry in lists]


def are_uneven(lists: Sequence[Tensors], rank_map: RankMap, call: str) -> bool:
    """Returns True if there is one entry for each rank, and the entries differ in size.

    The decision depends only on a list that all ranks pass with the same sizes, so all ranks make the same calls.
    """
    if isinstance(lists, torch.Tensor) or not isinstance(lists, Sized) or len(lists) != rank_map.size:
        return False
    return len({count_elements(as_list(entry, call)) for entry in lists}) > 1


def require_counts(
    lists: Sequence[list[torch.Tensor]], count: int, rank_map: RankMap, call: str, argument: str
) -> None:
    """Checks that each of `lists` has `count` elements."""
    for entry, tensors in enumerate(lists):
        if count_elements(tensors) != count:
            raise ValueError(
                f"rank {rank_map.me.rank}: {call}: entry {entry} of {argument} has {count_elements(tensors)} elements; "
                f"all must have {count}"
            )


def require_own_count(
    lists: Sequence[list[torch.Tensor]], count: int, rank_map: RankMap, call: str, argument: str
) -> None:
    """Checks that this rank's entry in `lists`, whose entries differ in size, has `count` elements."""
    mine = rank_map.rank
    seen = count_elements(lists[mine])
    if seen != count:
        raise ValueError(
            f"rank {rank_map.me.rank}: {call}: entry {mine} of {argument}, which is this rank's, has {seen} elements, "
            f"but this rank's tensor has {count}; both must have the same number"
        )


class TorchOptions(Protocol):
    """Any of torch's option objects; `rootRank` is missing for calls without a root."""

    timeout: timedelta
    rootRank: int  # noqa: N815 (the name in torch)


def are_options(argument: object) -> TypeIs[TorchOptions]:
    """Returns True if `argument` is an option object, as opposed to the value of an option."""
    return hasattr(argument, "timeout")


def time_limit(opts: object, timeout: Timeout | None = None) -> Timeout | None:
    """Returns a call's timeout, or None if the group's timeout applies.

    `opts` is an option object or itself a timeout; `timeout` takes precedence.
    """
    if timeout is None:
        timeout = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None)
    return None if isinstance(timeout, timedelta) and timeout <= _UNSET else timeout


def reduction_of(op: object) -> Reduction:
    """Converts an option object, a torch reduction or a Paceline reduction to a Paceline reduction; None means SUM."""
    if isinstance(op, (ReduceOp, PremulSum)):
        return op
    op = getattr(op, "reduceOp", op)
    kind = getattr(op, "op", op)
    if type(kind) is _TORCHS_KIND and kind in _BY_TORCHS_KIND:
        return _BY_TORCHS_KIND[kind]
    if op is None or are_options(op):
        return ReduceOp.SUM
    if isinstance(op, (ReduceOp, PremulSum)):
        return op
    ours = ReduceOp.__members__.get(str(getattr(kind, "name", None)))
    if ours is None or (not hasattr(type(op), "RedOpType") and not type(op).__name__ == "RedOpType"):
        raise TypeError(_NOT_A_REDUCTION.format(f"{short_repr(op)} ({type(op).__name__})"))
    if ours is ReduceOp.PREMUL_SUM:
        factor: float | torch.Tensor = cast(Any, op).__getstate__()[1]
        return PremulSum(factor)
    return ours


def required_reduction(op: object) -> Reduction:
    """Converts a reduction like `reduction_of`, but rejects None, as torch's functions do."""
    if op is None:
        raise TypeError(_NOT_A_REDUCTION.format("None"))
    return reduction_of(op)


def one_list(lists: Sequence[Tensors], call: str) -> Sequence[torch.Tensor]:
    """Unwraps the only list in `lists`; torch programs pass one list per device. A list of tensors stays unchanged."""
    if lists and isinstance(lists[0], torch.Tensor):
        return cast("Sequence[torch.Tensor]", lists)
    if len(lists) != 1:
        raise ValueError(f"{call}: got {len(lists)} lists of tensors, but a process has one device; pass one list")
    return cast("Sequence[torch.Tensor]", lists[0])
