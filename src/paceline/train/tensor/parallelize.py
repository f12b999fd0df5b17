"""Divides a model among the ranks of a group.

How one module of a model is divided among the ranks of a group.

The styles have the names and the arguments of `torch.distributed.tensor.parallel`'s, so a plan for
`parallelize_module` can be used unchanged. Activations stay plain tensors: `Replicate()` is one that every rank has
whole, and `Shard(dim)` one of which each rank has a part along `dim`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from paceline.comm.group.default import Group, resolve
from paceline.comm.group.device_mesh import DeviceMesh
from paceline.comm.group.eager import eager
from paceline.comm.group.process_group import ProcessGroup
from paceline.train.module_tensors import broadcast_tensors
from paceline.train.tensor.layers import (
    WHOLE,
    ColwiseEmbedding,
    ColwiseLinear,
    Layout,
    RowwiseEmbedding,
    RowwiseLinear,
    joined,
    joined_for_parts,
    split,
    summed,
)
from paceline.train.tensor.weight_slice import divided, slice_of

Divided = TypeVar("Divided", ColwiseLinear, RowwiseLinear, ColwiseEmbedding, RowwiseEmbedding)

Divide = Callable[[torch.Tensor, int], nn.Parameter]
"""Returns this rank's part of a weight along a dimension; tied weights get the same part."""


class ParallelStyle(ABC):
    """How a module is divided."""

    @abstractmethod
    def apply(self, module: nn.Module, name: str, group: ProcessGroup, divide: Divide) -> None:
        """Makes `module`, which is called `name`, the part of itself that this rank computes.

        Raises:
            TypeError: the style has no meaning for such a module.
        """


class ColwiseParallel(ParallelStyle):
    """Divides an `nn.Linear` by output features, or an `nn.Embedding` by features.

    Args:
        input_layouts: how the input comes: whole (the default), or as `Shard(dim)`, such as the sequence after a
            `SequenceParallel` layer; it is then gathered first.
        output_layouts: `Shard(-1)` by default: each rank has its own features. `Replicate()` gathers them.
        use_local_output: torch's argument; tensors are always plain here.

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
        _require(self.output_layout in (WHOLE, -1), "ColwiseParallel: output_layouts", output_layouts, "Shard(-1)")

    def apply(self, module: nn.Module, name: str, group: ProcessGroup, divide: Divide) -> None:
        """See the class."""
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
            embedding.output_layout = self.output_layout
            embedding.all_embedding_dim = embedding.embedding_dim
            embedding.weight = divide(embedding.weight, 1)
            embedding.embedding_dim = embedding.weight.size(1)
        else:
            raise _unfit(self, module, name, "nn.Linear or nn.Embedding")


class RowwiseParallel(ParallelStyle):
    """Divides an `nn.Linear` by input features, or an `nn.Embedding` by indices.

    Args:
        input_layouts: how a linear layer's input comes: as `Shard(-1)` (the default), such as from a
            `ColwiseParallel` layer, or whole, as `Replicate()`. An embedding's input is always whole.
        output_layouts: `Replicate()` by default: the ranks' results are added up. With `Shard(dim)`, such as the
            sequence's dimension, each rank has a part of the sum.
        use_local_output: torch's argument; tensors are always plain here.
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
        _require(self.input_layout in (WHOLE, -1), "RowwiseParallel: input_layouts", input_layouts, "Shard(-1)")

    def apply(self, module: nn.Module, name: str, group: ProcessGroup, divide: Divide) -> None:
        """See the class."""
        if isinstance(module, nn.Linear):
            linear = _become(module, RowwiseLinear, group)
            linear.input_layout, linear.output_layout = self.input_layout, self.output_layout
            linear.weight = divide(linear.weight, 1)
            linear.in_features = linear.weight.size(1)
            if linear.bias is not None and self.output_layout is not WHOLE:
                linear.bias.register_hook(_summing(group))  # each rank sees a part of the tokens
        elif isinstance(module, nn.Embedding):
            _require_plain(module, name)
            embedding = _become(module, RowwiseEmbedding, group)
            embedding.output_layout = self.output_layout
            embedding.all_num_embeddings = embedding.num_embeddings
            embedding.weight = divide(embedding.weight, 0)
            embedding.num_embeddings = embedding.weight.size(0)
        else:
            raise _unfit(self, module, name, "nn.Linear or nn.Embedding")


class SequenceParallel(ParallelStyle):
    """Has each rank compute a part of the sequence, with whole weights: for LayerNorm, RMSNorm and Dropout.

    The module's input is that part already, as it comes from a `RowwiseParallel(output_layouts=Shard(1))`. The
    gradients of its weights are added up over the ranks.

    Args:
        sequence_dim: the dimension of the sequence; 1 by default.
        use_local_output: torch's argument; tensors are always plain here.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        self.sequence_dim = sequence_dim

    def apply(self, module: nn.Module, name: str, group: ProcessGroup, divide: Divide) -> None:
        """See the class."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(_summing(group))


class PrepareModuleInput(ParallelStyle):
    """Changes how the inputs of a module are divided.

    Args:
        input_layouts: how the positional arguments come, one for each; None for those that are left alone.
        desired_input_layouts: how the module wants them. From `Shard(dim)` to `Replicate()` the parts are gathered for
            a module that uses them differently on each rank, such as an attention whose heads are divided.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | Sequence[Placement | None] | None = None,
        desired_input_layouts: Placement | Sequence[Placement | None] | None = None,
        use_local_output: bool = True,
    ) -> None:
        self._come, self._wanted = _listed(input_layouts), _listed(desired_input_layouts)
        if len(self._come) != len(self._wanted):
            raise ValueError(
                f"PrepareModuleInput: there are {len(self._come)} input_layouts and {len(self._wanted)} "
                "desired_input_layouts; give one of each for every positional argument"
            )

    def apply(self, module: nn.Module, name: str, group: ProcessGroup, divide: Divide) -> None:
        """See the class."""

        def prepare(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            known = zip(arguments, self._come, self._wanted, strict=False)
            changed = [_moved(each, come, wanted, group, is_input=True) for each, come, wanted in known]
            return (*changed, *arguments[len(changed) :])

        module.register_forward_pre_hook(prepare)


class PrepareModuleOutput(ParallelStyle):
    """Changes how the outputs of a module are divided.

    Args:
        output_layouts: how the outputs come, one for each; None for those that are left alone.
        desired_output_layouts: how they are wanted. From `Shard(dim)` to `Replicate()` the parts are gathered, for all
            ranks to use alike, such as for the loss.
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | Sequence[Placement | None],
        desired_output_layouts: Placement | Sequence[Placement | None],
        use_local_output: bool = True,
    ) -> None:
        self._come, self._wanted = _listed(output_layouts), _listed(desired_output_layouts)
        if len(self._come) != len(self._wanted):
            raise ValueError(
                f"PrepareModuleOutput: there are {len(self._come)} output_layouts and {len(self._wanted)} "
                "desired_output_layouts; give one of each for every output"
            )

    def apply(self, module: nn.Module, name: str, group: ProcessGroup, divide: Divide) -> None:
        """See the class."""

        def prepare(_: nn.Module, __: object, output: Any) -> Any:
            several = output if isinstance(output, tuple) else (output,)
            known = zip(several, self._come, self._wanted, strict=False)
            changed = [_moved(each, come, wanted, group, is_input=False) for each, come, wanted in known]
            return (*changed, *several[len(changed) :]) if isinstance(output, tuple) else changed[0]

        module.register_forward_hook(prepare)


def _moved(tensor: Any, come: Placement | None, wanted: Placement | None, group: ProcessGroup, is_input: bool) -> Any:
    if come is None or wanted is None or come == wanted or not isinstance(tensor, torch.Tensor):
        return tensor
    if isinstance(come, Replicate) and isinstance(wanted, Shard):
        return split(tensor, wanted.dim, group)
    if isinstance(come, Shard) and isinstance(wanted, Replicate):
        join = joined_for_parts if is_input else joined
        return join(tensor, come.dim, tensor.size(come.dim) * group.size(), group)
    raise ValueError(f"tensor parallelism: {come} cannot become {wanted}; use Shard(dim) and Replicate()")


def _summing(group: ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor]:
    return eager(lambda grad: summed(grad, group))


def _become(module: nn.Module, kind: type[Divided], group: ProcessGroup) -> Divided:
    """Makes a layer a divided one in place, so that hooks, names and references to it stay."""
    module.__class__ = kind
    divided_module = cast(Divided, module)
    divided_module.group = group
    return divided_module


def _require_plain(module: nn.Embedding, name: str) -> None:
    if module.padding_idx is not None or module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
        raise TypeError(
            f"parallelize_module: the embedding {name!r} has padding_idx, max_norm, scale_grad_by_freq or sparse, "
            "which cannot be divided; leave it out of the plan"
        )


def _unfit(style: ParallelStyle, module: nn.Module, name: str, wanted: str) -> TypeError:
    kind = type(style).__name__
    return TypeError(f"parallelize_module: {name!r} is a {type(module).__name__}; {kind} needs {wanted}")


def _layout(placement: Placement | None, default: Layout, what: str) -> Layout:
    if placement is None:
        return default
    if isinstance(placement, Replicate):
        return WHOLE
    if isinstance(placement, Shard):
        return int(placement.dim)
    raise ValueError(f"{what} is {placement}; it must be Replicate() or Shard(dim)")


def _require(holds: bool, what: str, seen: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{what} is {seen}; it must be Replicate() or {wanted}")


def _listed(layouts: Placement | Sequence[Placement | None] | None) -> list[Placement | None]:
    if layouts is None or isinstance(layouts, Placement):
        return [layouts]
    return list(layouts)


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | ProcessGroup | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Divides modules of `module` in place, as a plan says; all ranks call this with the same model and plan.

    Args:
        module: the whole model, with the same weights on every rank unless `src_data_rank` is a rank.
        device_mesh: a mesh of one dimension, such as `mesh["tp"]`, or a group; the default group if None.
        parallelize_plan: a style for `module` itself, or styles by the names of its modules, in which `*` stands for
            one part of a name: `{"layers.*.mlp.up": ColwiseParallel()}`.
        src_data_rank: the rank in the group whose weights are divided, as in torch; None takes each rank's own.

    Returns:
        `module`. `parameters()` are then this rank's parts, so make optimizers afterwards.

    Raises:
        ValueError: a name of the plan is in no module, or the mesh has several dimensions.
        TypeError: a style does not fit its module.
    """
    group = _group_of(device_mesh)
    if parallelize_plan is None:
        return module
    if src_data_rank is not None:
        broadcast_tensors([*module.parameters(), *module.buffers()], group, src_data_rank)
    plan = parallelize_plan if isinstance(parallelize_plan, Mapping) else {"": parallelize_plan}
    parts: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}  # tied weights stay tied

    def divide(parameter: torch.Tensor, dim: int) -> nn.Parameter:
        if (already := slice_of(parameter)) is not None:
            raise ValueError(
                f"parallelize_module: a weight is divided already, in dimension {already.dim}; divide it once"
            )
        if id(parameter) not in parts:
            parts[id(parameter)] = (parameter, divided(parameter, dim, group))
        part = parts[id(parameter)][1]
        mine = slice_of(part)
        if mine is None or mine.dim != dim:
            raise ValueError(
                "parallelize_module: two modules share a weight, and the plan divides it along different dimensions; "
                "choose styles that divide it alike, such as RowwiseParallel for an embedding and ColwiseParallel for "
                "the linear layer that it is tied to"
            )
        return part

    for pattern, style in plan.items():
        found = [(name, each) for name, each in module.named_modules() if _matches(name, pattern)]
        if not found:
            raise ValueError(
                f"parallelize_module: no module is called {pattern!r}; the names are those of model.named_modules()"
            )
        for name, each in found:
            style.apply(each, name, group, divide)
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
