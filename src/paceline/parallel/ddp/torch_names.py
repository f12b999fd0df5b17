"""Attributes and methods of torch's DistributedDataParallel that programs use although torch does not document them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from paceline.group.process_group import ProcessGroup
from paceline.parallel.ddp.reducer import Reducer
from paceline.parallel.ddp.watched import WatchedModule
from paceline.parallel.tracked_tensors import ignore_tensors

_INSIDES = {
    "reducer": "there is no torch Reducer; use no_sync(), register_comm_hook() or static_graph=True",
    "logger": "there is no torch Logger; use _get_ddp_logging_data() or communication_wait_s()",
}


class TorchNames(nn.Module):
    """The part of `DistributedDataParallel` for programs that were written for torch's."""

    module: nn.Module
    process_group: ProcessGroup
    forward_sync_buffers: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    require_backward_grad_sync: bool
    _reducer: Reducer
    _watched: WatchedModule

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        if name in _INSIDES:
            raise AttributeError(f"paceline.DistributedDataParallel has no attribute {name!r}: {_INSIDES[name]}")
        return super().__getattr__(name)

    @property
    def broadcast_buffers(self) -> bool:
        """Returns `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def require_forward_param_sync(self) -> bool:
        """Returns whether the next forward may copy buffers, which it does not within `no_sync`."""
        return self.require_backward_grad_sync

    @property
    def device(self) -> torch.device:
        """Returns the device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def device_type(self) -> str:
        """Returns the type of `device`, such as "cpu"."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Returns whether the module's parameters are on several devices."""
        return len({param.device for param in self.module.parameters()}) > 1

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Returns the names of the parameters and buffers that are neither copied nor averaged with the others."""
        return set(self._watched.tracked.ignored)

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """Returns the module's buffers by name, without those that are ignored."""
        ignored = self._watched.tracked.ignored
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in ignored}

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """Returns the values of `named_module_buffers`."""
        return list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Returns whether a forward whose backward averages would copy buffers now, as it does in training mode."""
        syncs = self.require_backward_grad_sync and self.forward_sync_buffers and self.training
        return syncs and self._watched.has_buffers()

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Returns those of torch's figures about a wrapped module that have a meaning here."""
        params = self._watched.tracked.trained.values()
        hook = self._reducer.comm_hook
        return {
            "module_name": type(self.module).__name__,
            "backend_name": self.process_group.backend,
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "iteration": self._reducer.forwards,
            "bucket_sizes": ", ".join(map(str, self._reducer.bucket_sizes())),
            "num_parameter_tensors": len(params),
            "total_parameter_size_bytes": sum(param.nbytes for param in params),
            "dtypes": ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in params})),
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "comm_hook": "" if hook is None else hook.name,
        }

    def _set_static_graph(self) -> None:
        """Does what `static_graph=True` does, for programs that decide between wrapping and the first forward.

        Raises:
            RuntimeError: there was a forward already.
        """
        if self.static_graph:
            return
        if self._reducer.forwards:
            raise RuntimeError(
                "_set_static_graph was called after a forward, whose backward expects that the graph may change; call "
                "it before the first forward, or wrap the module with static_graph=True"
            )
        self.static_graph = True
        self._reducer.make_static()

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Makes wrappers that are created afterwards neither copy nor average the tensors with these names."""
        ignore_tensors(module, params_and_buffers_to_ignore)
