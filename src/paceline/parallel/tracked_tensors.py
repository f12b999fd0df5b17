"""Which parameters and buffers of a module take part in data parallel training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's DistributedDataParallel reads the same attribute


@dataclass(frozen=True)
class TrackedTensors:
    """A module's trained parameters, frozen parameters and buffers by name, without those that are to be ignored.

    `sparse` holds the names of trained parameters whose layers make sparse gradients; `ignored` the ignored names.
    """

    trained: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    sparse: frozenset[str]
    ignored: frozenset[str]

    def tensors(self, with_buffers: bool = True) -> list[torch.Tensor]:
        """Returns all parameters and, by default, buffers, but those on the meta device, which have no values."""
        buffers = [each for each in self.buffers.values() if not each.is_meta] if with_buffers else []
        return [*self.trained.values(), *self.frozen.values(), *buffers]


def collect_tracked(module: nn.Module, also_ignored: Iterable[str] = ()) -> TrackedTensors:
    """Returns the tensors of a module in order of registration; a tensor with several names has its first.

    Args:
        module: the module; its class or a call of `ignore_tensors` may name tensors to be ignored.
        also_ignored: the names of further tensors to be ignored.
    """
    ignored = frozenset(getattr(module, _IGNORED, ())) | frozenset(also_ignored)
    all_params = list(module.named_parameters(remove_duplicate=False))
    all_buffers = list(module.named_buffers(remove_duplicate=False))
    left_out = {id(tensor) for name, tensor in (*all_params, *all_buffers) if name in ignored}
    params = {name: param for name, param in module.named_parameters() if id(param) not in left_out}
    embeddings = [each for each in module.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag))]
    sparse = {id(each.weight) for each in embeddings if each.sparse}
    return TrackedTensors(
        trained={name: param for name, param in params.items() if param.requires_grad},
        frozen={name: param for name, param in params.items() if not param.requires_grad},
        buffers={name: buffer for name, buffer in module.named_buffers() if id(buffer) not in left_out},
        sparse=frozenset(name for name, param in params.items() if param.requires_grad and id(param) in sparse),
        ignored=ignored,
    )


def ignore_tensors(module: nn.Module, names: Iterable[str]) -> None:
    """Excludes these parameters and buffers of `module` from what wrappers copy and average.

    Raises:
        ValueError: the module has no such parameter or buffer.
    """
    names = list(names)
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"the module has no parameter or buffer {', '.join(map(repr, unknown))}; names are those of "
            "module.named_parameters() and module.named_buffers()"
        )
    setattr(module, _IGNORED, names)
