"""parallelize_module: divides a model's modules among the ranks in a group, as specified by parallel styles.

The styles have the same names and arguments as in `torch.distributed.tensor.parallel`, so a plan for torch's
`parallelize_module` works unchanged. Activations are always plain tensors: `Replicate()` denotes a tensor that every
rank holds whole, and `Shard(dim)` denotes a tensor that is divided along `dim`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from paceline.comm.group.default import Group, resolve
from paceline.comm.group.eager import eager
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.subgroups import DeviceMesh
from paceline.train.module_tensors import broadcast_tensors
from paceline.train.tensor.layers import (
    WHOLE,
    ColwiseEmbedding,
    ColwiseLinear,
    Layout,
    RowwiseEmbedding,
    RowwiseLinear,
    copied,
    divided,
    joined_for_parts,
    redistributed,
    slice_of,
    split,
    summed,
    summed_into_parts,
)

Divided = TypeVar("Divided", ColwiseLinear, RowwiseLinear, ColwiseEmbedding, RowwiseEmbedding)

Divide = Callable[[torch.Tensor, int], nn.Parameter]
"""A function that returns this rank's part of a weight along a dimension; tied weights remain tied."""


class ParallelStyle(ABC):
    """Base class for styles, each of which divides a module among ranks."""

    @abstractmethod
    def apply(self, module: nn.Module, name: str, group: ProcessGroup, divide: Divide) -> None:
        """Modifies the module `name` in place; raises TypeError if the style does not support the module's type."""


class ColwiseParallel(ParallelStyle):
    """Divides an `nn.Linear` by output features, or an `nn.Embedding` by features.

    Args:
        input_layouts: the layout of the input: `Replicate()` (the default), or `Shard(dim)` for a divided input, such
            as the output of a `SequenceParallel` layer, which is then gathered.
        output_layouts: the layout of the output: `Shard(-1)` (the default), which leaves the features divided,
            `Replicate()`, which gathers them, or `Shard(dim)`, which divides the gathered features along `dim`.
        use_local_output: has no effect; accepted for compatibility with torch.

    Example::

        plan = {"up": paceline.ColwiseParallel(), "down": paceline.RowwiseParallel()}
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layout = _layout(input_layouts, WHOLE, "ColwiseParallel: input_layouts")
        self.output_layout = _layout(output_layouts, -1, "ColwiseParallel: output_layouts")

    def apply(self, module: nn.Module, name: str, group: ProcessGroup, divide: Divide) -> None:
        """Applies this style to the module `name`, as described in the class."""
        if isinstance(module, nn.Linear):
            linear = _become(module, ColwiseLinear, group)
            linear.input_layout, linear.output_layout = self.input_layout, self.output_layout
            linear.all_out_features = linear.out_features
            linear.weight = divide(linear.weight, 0)
            if linear.bias is not None:
                linear.bias = divide(linear.bias, 0)
            linear.out_features = linear.weight.size(0)
        elif isinstance(module, nn.Embedding):
            _require_plain(module, name)
            embedding = _become(module, ColwiseEmbedding, group)
            embedding.input_layout, embedding.output_layout = self.input_layout, self.output_layout
            embedding.all_embedding_dim = embedding.embedding_dim
            embedding.weight = divide(embedding.weight, 1)
            embedding.embedding_dim = embedding.weight.size(1)
        else:
            raise _unfit(self, module, name)


class RowwiseParallel(ParallelStyle):
    """Divides an `nn.Linear` by input features, or an `nn.Embedding` by indices.

    Args:
        input_layouts: the layout of the input: `Replicate()`, the default for an embedding; or `Shard(dim)`. The
            default for a linear layer is `Shard(-1)`, as returned by a `ColwiseParallel` layer.
        output_layouts: the layout of the output, which is the sum of the ranks' results: `Replicate()` (the default),
            or `Shard(dim)`, for example along the sequence dimension.
        use_local_output: has no effect; accepted for compatibility with torch.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layout = _layout(input_layouts, -1, "RowwiseParallel: input_layouts")
        self.output_layout = _layout(output_layouts, WHOLE, "RowwiseParallel: output_layouts")
        self._has_default_input = input_layouts is None

    def apply(self, module: nn.Module, name: str, group: ProcessGroup, divide: Divide) -> None:
        """Applies this style to the module `name`, as described in the class."""
        if isinstance(module, nn.Linear):
            linear = _become(module, RowwiseLinear, group)
            linear.input_layout, linear.output_layout = self.input_layout, self.output_layout
            linear.weight = divide(linear.weight, 1)
            linear.in_features = linear.weight.size(1)
            if linear.bias is not None and self.output_layout is not WHOLE:
                linear.bias.register_hook(_summing(group))  # each rank adds the bias only to its part of the output
        elif isinstance(module, nn.Embedding):
            _require_plain(module, name)
            embedding = _become(module, RowwiseEmbedding, group)
            embedding.input_layout = WHOLE if self._has_default_input else self.input_layout
            embedding.output_layout = self.output_layout
            embedding.all_num_embeddings = embedding.num_embeddings
            embedding.weight = divide(embedding.weight, 0)
            embedding.num_embeddings = embedding.weight.size(0)
        else:
            raise _unfit(self, module, name)


class SequenceParallel(ParallelStyle):
    """Runs a LayerNorm, RMSNorm or Dropout module with replicated weights on each rank's part of the sequence.

    The module's input must already be divided, for example by `RowwiseParallel(output_layouts=Shard(1))`. The gradients
    of the module's weights are summed over the ranks.

    Args:
        sequence_dim: the dimension of the sequence; 1 by default.
        use_local_output: has no effect; accepted for compatibility with torch.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        self.sequence_dim = sequence_dim

    def apply(self, module: nn.Module, name: str, group: ProcessGroup, divide: Divide) -> None:
        """Applies this style to the module `name`, as described in the class."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(_summing(group))


class PrepareModuleInput(ParallelStyle):
    """Converts a module's inputs to other layouts.

    Args:
        input_layouts: the current layout of each positional argument, or None for arguments that stay unchanged.
        desired_input_layouts: the layouts that the module requires. A conversion from `Shard(dim)` to `Replicate()`
            gathers the parts for a module that computes differently on each rank, such as attention with divided heads.
        input_kwarg_layouts: the current layouts of keyword arguments by name; all other keyword arguments stay
            unchanged.
        desired_input_kwarg_layouts: the layouts that the module requires, with the same names.
        use_local_output: has no effect; accepted for compatibility with torch.

    Raises:
        ValueError: a layout has no desired layout, or, when the module is called, there are fewer positional arguments
            than layouts.

    Example::

        attention = PrepareModuleInput(
            input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"x": Replicate()}
        )  # for a block that calls self.attention(x=x)
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | Sequence[Placement | None] | None = None,
        desired_input_layouts: Placement | Sequence[Placement | None] | None = None,
        input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        use_local_output: bool = True,
    ) -> None:
        self._conversions: list[tuple[Placement | None, Placement | None]] = []
        if input_layouts is not None:
            self._conversions = _paired("PrepareModuleInput", "input", input_layouts, desired_input_layouts)
        old, new = input_kwarg_layouts or {}, desired_input_kwarg_layouts or {}
        if input_kwarg_layouts is not None and old.keys() != new.keys():
            raise ValueError(
                f"PrepareModuleInput: input_kwarg_layouts has the names {list(old)}, and desired_input_kwarg_layouts "
                f"has {list(new)}; pass one of each for every keyword argument"
            )
        self._keyword_conversions = {name: (layout, new[name]) for name, layout in old.items()}

    def apply(self, module: nn.Module, name: str, group: ProcessGroup, divide: Divide) -> None:
        """Applies this style to the module `name`, as described in the class."""

        def prepare(
            _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if len(arguments) < len(self._conversions):
                raise ValueError(
                    f"{group.me}: PrepareModuleInput has {len(self._conversions)} input_layouts, and {name!r} was "
                    f"called with {len(arguments)} positional arguments and the keywords {list(keywords)}; for an "
                    "argument that is passed by keyword use input_kwarg_layouts"
                )
            changed = {
                key: _converted(value, *self._keyword_conversions[key], group, is_input=True)
                if key in self._keyword_conversions
                else value
                for key, value in keywords.items()
            }
            return _all_converted(arguments, self._conversions, group, is_input=True), changed

        module.register_forward_pre_hook(prepare, with_kwargs=True)


class PrepareModuleOutput(ParallelStyle):
    """Converts a module's outputs to other layouts.

    Args:
        output_layouts: the current layout of each output, or None for outputs that stay unchanged. As in torch, an
            output that is a tuple with one element is replaced with this element.
        desired_output_layouts: the required layouts. A conversion from `Shard(dim)` to `Replicate()` gathers the parts,
            from which all ranks must then compute the same result, for example the loss.
        use_local_output: has no effect; accepted for compatibility with torch.

    Raises:
        ValueError: a layout has no desired layout, or, when the module is called, there are fewer outputs than layouts.
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | Sequence[Placement | None],
        desired_output_layouts: Placement | Sequence[Placement | None],
        use_local_output: bool = True,
    ) -> None:
        self._conversions = _paired("PrepareModuleOutput", "output", output_layouts, desired_output_layouts)

    def apply(self, module: nn.Module, name: str, group: ProcessGroup, divide: Divide) -> None:
        """Applies this style to the module `name`, as described in the class."""

        def prepare(_: nn.Module, __: object, output: Any) -> Any:
            outputs = output if isinstance(output, tuple) else (output,)
            if len(outputs) < len(self._conversions):
                raise ValueError(
                    f"{group.me}: PrepareModuleOutput has {len(self._conversions)} output_layouts, and {name!r} "
                    f"returned {len(outputs)} outputs; pass one layout for every output"
                )
            changed = _all_converted(outputs, self._conversions, group, is_input=False)
            return changed[0] if len(changed) == 1 else changed

        module.register_forward_hook(prepare)


class PrepareModuleInputOutput(ParallelStyle):
    """Converts a module's inputs as `PrepareModuleInput` does, and its outputs as `PrepareModuleOutput` does.

    Args:
        input_layouts: the current layout of each positional argument, or None for arguments that stay unchanged.
        desired_input_layouts: the layouts that the module requires.
        input_kwarg_layouts: the current layouts of keyword arguments by name.
        desired_input_kwarg_layouts: the layouts that the module requires, with the same names.
        use_local_input: has no effect; accepted for compatibility with torch.
        output_layouts: the current layout of each output, or None for outputs that stay unchanged.
        desired_output_layouts: the required layouts of the outputs.
        use_local_output: has no effect; accepted for compatibility with torch.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | Sequence[Placement | None] | None = None,
        desired_input_layouts: Placement | Sequence[Placement | None] | None = None,
        input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | Sequence[Placement | None],
        desired_output_layouts: Placement | Sequence[Placement | None],
        use_local_output: bool = True,
    ) -> None:
        self._input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
        )
        self._output = PrepareModuleOutput(output_layouts=output_layouts, desired_output_layouts=desired_output_layouts)

    def apply(self, module: nn.Module, name: str, group: ProcessGroup, divide: Divide) -> None:
        """Applies this style to the module `name`, as described in the class."""
        self._input.apply(module, name, group, divide)
        self._output.apply(module, name, group, divide)


def _paired(
    style: str,
    which: str,
    layouts: Placement | Sequence[Placement | None],
    desired: Placement | Sequence[Placement | None] | None,
) -> list[tuple[Placement | None, Placement | None]]:
    old, new = _listed(layouts), [] if desired is None else _listed(desired)
    if len(old) != len(new):
        raise ValueError(
            f"{style}: there are {len(old)} {which}_layouts and {len(new)} desired_{which}_layouts; pass one of each "
            f"for every {'positional argument' if which == 'input' else 'output'}"
        )
    return list(zip(old, new, strict=True))


def _all_converted(
    values: Sequence[Any],
    conversions: Sequence[tuple[Placement | None, Placement | None]],
    group: ProcessGroup,
    is_input: bool,
) -> tuple[Any, ...]:
    known = zip(values, conversions, strict=False)  # further values stay unchanged
    changed = [_converted(value, old, new, group, is_input) for value, (old, new) in known]
    return (*changed, *values[len(changed) :])


def _converted(tensor: Any, old: Placement | None, new: Placement | None, group: ProcessGroup, is_input: bool) -> Any:
    if old is None or new is None or old == new or not isinstance(tensor, torch.Tensor):
        return tensor
    if isinstance(old, Replicate) and isinstance(new, Shard):
        return split(tensor, new.dim, group)
    if is_input and isinstance(old, Shard) and isinstance(new, Replicate):
        return joined_for_parts(tensor, old.dim, tensor.size(old.dim) * group.size(), group)
    if isinstance(old, Shard) and isinstance(new, (Shard, Replicate)):
        return redistributed(tensor, old.dim, new.dim if isinstance(new, Shard) else WHOLE, group)
    if isinstance(old, Partial) and old.reduce_op == "sum":
        if isinstance(new, Shard):
            return summed_into_parts(tensor, new.dim, group)
        if isinstance(new, Replicate):
            whole = summed(tensor, group)
            return copied(whole, group) if is_input else whole
    raise ValueError(
        f"{group.me}: tensor parallelism: {old} cannot become {new}; use Shard(dim), Replicate(), or Partial() as the "
        "current layout"
    )


def _summing(group: ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    return eager(lambda grad: summed(grad, group))


def _become(module: nn.Module, kind: type[Divided], group: ProcessGroup) -> Divided:
    """Changes the class of a layer in place, to preserve hooks, names and references to the layer."""
    module.__class__ = kind
    layer = cast(Divided, module)
    layer.group = group
    return layer


def _require_plain(module: nn.Embedding, name: str) -> None:
    if module.padding_idx is not None or module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise TypeError(
            f"parallelize_module: the embedding {name!r} has padding_idx, max_norm, scale_grad_by_freq or sparse, "
            "which cannot be divided; leave it out of the plan"
        )


def _unfit(style: ParallelStyle, module: nn.Module, name: str) -> TypeError:
    return TypeError(
        f"parallelize_module: {name!r} is a {type(module).__name__}; {type(style).__name__} needs nn.Linear or "
        "nn.Embedding"
    )


def _layout(placement: Placement | None, default: Layout, what: str) -> Layout:
    if placement is None:
        return default
    if isinstance(placement, Replicate):
        return WHOLE
    if isinstance(placement, Shard):
        return int(placement.dim)
    raise ValueError(f"{what} is {placement}; it must be Replicate() or Shard(dim)")


def _listed(layouts: Placement | Sequence[Placement | None]) -> list[Placement | None]:
    return [layouts] if isinstance(layouts, Placement) else list(layouts)


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | ProcessGroup | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Divides submodules of `module` in place; all ranks must call it with the same model and plan.

    Args:
        module: the whole model. Its weights must be the same on every rank if `src_data_rank` is None.
        device_mesh: a one-dimensional mesh, such as `mesh["tp"]`, or a process group; if None, the default group.
        parallelize_plan: a style for `module` itself, or a mapping from module names to styles. In a name, `*` matches
            one component: `{"layers.*.mlp.up": ColwiseParallel()}`.
        src_data_rank: the group rank whose weights are copied to all ranks first, as in torch. If None, each rank uses
            its own weights.

    Returns:
        `module`. Its `parameters()` are now this rank's parts, so create optimizers after this call.

    Raises:
        ValueError: a name in the plan matches no module, or the mesh has several dimensions.
        TypeError: a style does not support its module.
    """
    group = _group_of(device_mesh)
    if parallelize_plan is None:
        return module
    if src_data_rank is not None:
        broadcast_tensors([*module.parameters(), *module.buffers()], group, src_data_rank)
    plan = parallelize_plan if isinstance(parallelize_plan, Mapping) else {"": parallelize_plan}
    parts: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}  # by id of the whole weight, to keep tied weights tied

    def divide(parameter: torch.Tensor, dim: int) -> nn.Parameter:
        if (already := slice_of(parameter)) is not None:
            raise ValueError(
                f"parallelize_module: a weight is divided already, in dimension {already.dim}; divide it once"
            )
        if id(parameter) not in parts:
            parts[id(parameter)] = (parameter, divided(parameter, dim, group))
        part = parts[id(parameter)][1]
        own = slice_of(part)
        if own is None or own.dim != dim:
            raise ValueError(
                "parallelize_module: two modules share a weight, and the plan divides it along different dimensions; "
                "choose styles that divide it in the same way, such as RowwiseParallel for an embedding and "
                "ColwiseParallel for the linear layer that it is tied to"
            )
        return part

    for pattern, style in plan.items():
        found = [(name, submodule) for name, submodule in module.named_modules() if _matches(name, pattern)]
        if not found:
            raise ValueError(
                f"parallelize_module: no module has the name {pattern!r}; the names are those of model.named_modules()"
            )
        for name, submodule in found:
            style.apply(submodule, name, group, divide)
    return module


def _group_of(device_mesh: DeviceMesh | ProcessGroup | None) -> ProcessGroup:
    if isinstance(device_mesh, DeviceMesh):
        return device_mesh.get_group()
    group: Group = device_mesh
    chosen = resolve(group)
    if chosen is None:
        raise ValueError("parallelize_module: this rank is not in the group; call it on the ranks of the group only")
    return chosen


def _matches(name: str, pattern: str) -> bool:
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))
