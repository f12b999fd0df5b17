"""Arguments to DistributedDataParallel: defaults, conversion of torch's arguments, and checks for conflicts.

If an argument is wrong, these functions raise an error. Only `choose_wire` can return the error instead, because all
ranks must receive it before it is raised.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_origin

import torch
from torch import nn

from paceline.comm.engine.channel import QUANTIZED_TYPES
from paceline.comm.group.compression import WireKind, checked_kind
from paceline.comm.group.default import default_group, given_or_default
from paceline.comm.group.process_group import ProcessGroup
from paceline.train.ddp.bucket_assignment import MIB, caps_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel.distributed import _MixedPrecision

DEFAULT_BUCKET_CAP_MB = 25


def choose_group(process_group: ProcessGroup | None, device_mesh: DeviceMesh | None) -> ProcessGroup:
    """Returns the group selected by `process_group` or `device_mesh`, or the default group if both are None."""
    if device_mesh is None:
        return given_or_default(process_group)
    if process_group is not None:
        raise RuntimeError("process_group and device_mesh were both given; pass one of them")
    if device_mesh.ndim != 1:
        raise RuntimeError(
            f"device_mesh has {device_mesh.ndim} dimensions; pass a mesh with one dimension, such as mesh['dp'], or "
            "process_group=paceline.new_group(ranks)"
        )
    group = default_group()
    ranks = device_mesh.mesh.tolist()
    if ranks != list(group.ranks):
        raise ValueError(
            f"device_mesh has the ranks {ranks}, and its groups are torch's, which this class cannot use; the default "
            f"group has the ranks {list(group.ranks)}. Give process_group=paceline.new_group({ranks}) instead"
        )
    return group


def choose_buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Returns whether to copy buffers when a module is wrapped, and whether to copy them before each forward pass."""
    if forward_sync_buffers is None:
        both = broadcast_buffers is None or broadcast_buffers
        return both, both
    if broadcast_buffers is not None:
        warnings.warn(
            f"broadcast_buffers={broadcast_buffers} is ignored, because forward_sync_buffers={forward_sync_buffers} "
            "was given too; leave broadcast_buffers out",
            FutureWarning,
            stacklevel=3,
        )
    return True, forward_sync_buffers


def choose_bucket_caps(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> tuple[int, ...]:
    """Returns the maximum bucket sizes in bytes, for `make_buckets`; with 0, each gradient has its own bucket."""
    for name, caps in (("bucket_cap_mb", [bucket_cap_mb]), ("bucket_cap_mb_list", bucket_cap_mb_list or [])):
        for cap in caps:
            if cap is not None and not cap >= 0:
                raise ValueError(f"{name} is {cap}; it must be positive, or 0 for a bucket for each gradient")
    if bucket_cap_mb_list:
        return tuple(int(cap * MIB) for cap in bucket_cap_mb_list)
    return caps_of(int((DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * MIB))


def choose_reduce_dtype(mixed_precision: _MixedPrecision | None) -> torch.dtype | None:
    """Returns the dtype in which gradients are averaged, or None if each gradient is averaged in its own dtype."""
    if mixed_precision is None:
        return None
    if mixed_precision.param_dtype is not None or mixed_precision.buffer_dtype is not None:
        dtype = mixed_precision.param_dtype or mixed_precision.buffer_dtype
        raise ValueError(
            f"mixed_precision requests parameters of {mixed_precision.param_dtype} and buffers of "
            f"{mixed_precision.buffer_dtype}; DistributedDataParallel does not cast the module. Run forward under "
            f"torch.autocast(device_type, {dtype}), and give mixed_precision=_MixedPrecision(reduce_dtype={dtype}) to "
            "average gradients in that dtype"
        )
    return mixed_precision.reduce_dtype


def require_whole_pairs(
    deterministic: bool,
    logical_shards: int | None,
    device_ids: object,
    delay_all_reduce_named_params: object,
    param_to_hook_all_reduce: object,
) -> None:
    """Checks that dependent arguments are given together, and that mutually exclusive arguments are not."""
    if deterministic != (logical_shards is not None) or (deterministic and device_ids):
        raise ValueError(
            f"deterministic is {deterministic}, logical_shards {logical_shards} and device_ids {device_ids}; "
            "deterministic=True needs logical_shards, such as 8; pass both or neither, and do not pass device_ids "
            "with them"
        )
    if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce must be given together: the second one "
            "determines when the gradients of the first are averaged"
        )
    if deterministic and delay_all_reduce_named_params is not None:
        raise ValueError(
            "delay_all_reduce_named_params was given with deterministic=True, which adds all gradients in a fixed "
            "order; leave one of them out"
        )


def require_delayed(
    module: nn.Module, named: Iterable[tuple[str, nn.Parameter]] | None, trigger: nn.Parameter | None
) -> list[tuple[str, nn.Parameter]]:
    """Returns the pairs in `named` after checking that they belong to the module."""
    if named is None or trigger is None:
        return []
    pairs = list(named)
    known = dict(module.named_parameters(remove_duplicate=False))
    for name, param in pairs:
        if known.get(name) is not param:
            raise ValueError(
                f"delay_all_reduce_named_params has a pair of {name!r} and a parameter that is not the module's "
                "parameter of this name; pass pairs from module.named_parameters()"
            )
    if not trigger.requires_grad:
        raise ValueError(
            "param_to_hook_all_reduce requires no gradient, so the delayed parameters would never be averaged; pass a "
            "parameter that is trained"
        )
    return pairs


def choose_wire(
    wire: WireKind | None, group: ProcessGroup, excluded: Mapping[str, bool], params: Mapping[str, nn.Parameter]
) -> tuple[WireKind | None, Exception | None]:
    """Returns the format to which gradients are rounded, and the error that prevents rounding; either can be None.

    If `wire` is None, the group's wire is used, provided that the other arguments and the parameters allow it.
    `excluded` lists the arguments that are incompatible with `wire`, each paired with whether it was given.
    """
    given = [name for name, is_given in excluded.items() if is_given]
    if wire is not None and given:
        raise ValueError(
            f"wire={wire!r} was given with {given[0]}, which determines how gradients are sent; pass one of them"
        )
    chosen = group.wire if wire is None else checked_kind(wire)
    unfit = [name for name, param in params.items() if param.dtype not in QUANTIZED_TYPES or not param.is_cpu]
    if wire is None:
        return (None if given or unfit else chosen), None
    if not unfit:
        return chosen, None
    param, types = params[unfit[0]], ", ".join(str(dtype).removeprefix("torch.") for dtype in QUANTIZED_TYPES)
    return chosen, TypeError(
        f"wire={wire!r}: the parameter {unfit[0]!r} is of {param.dtype} on {param.device}; only gradients of {types} "
        "on the CPU are rounded. Convert the module, or leave wire out"
    )


_UNCHECKED = (inspect.Parameter.empty, Any, object, Union, UnionType)


def require_hook(hook: object) -> None:
    """Checks a communication hook and its annotations.

    Annotations that are classes must name a bucket and a future. Other annotations, such as strings and unions, are not
    checked.
    """
    if not callable(hook):
        raise TypeError(
            f"the communication hook is a {type(hook).__name__}; it must be callable as hook(state, bucket)"
        )
    try:
        signature = inspect.signature(hook)
    except ValueError:
        return  # some functions in C have no signature
    bucket = signature.parameters.get("bucket")
    if bucket is not None and _is_other_class(bucket.annotation, {"GradBucket"}):
        raise ValueError(
            f"the communication hook's argument `bucket` is annotated as {bucket.annotation}; it is a GradBucket. "
            "Correct or remove the annotation"
        )
    if _is_other_class(signature.return_annotation, {"Future", "DeferredFuture", "Work"}):
        raise ValueError(
            f"the communication hook is annotated to return {signature.return_annotation}; it must return a "
            "torch.futures.Future[torch.Tensor], or the Work of a call with async_op=True"
        )


def _is_other_class(annotation: object, names: set[str]) -> bool:
    """Returns True if an annotation is None, or a class that neither has nor inherits one of these names."""
    kind = get_origin(annotation) or annotation
    if kind in _UNCHECKED or not isinstance(kind, type):
        return annotation is None
    return names.isdisjoint(base.__name__ for base in kind.__mro__)
