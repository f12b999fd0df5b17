"""A `TorchTrainer` for Ray Train whose workers use Paceline for collectives.

Example::

    from paceline.integrations.ray import TorchTrainer
    from ray.train import ScalingConfig

    trainer = TorchTrainer(train_loop_per_worker, scaling_config=ScalingConfig(num_workers=4))
    result = trainer.fit()

This is Ray's own trainer with a different process group. The training loop can use `ray.train.torch.prepare_model`,
PyTorch's `DistributedDataParallel` and Paceline's functions.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from paceline.interop.torch_backend import register

NAME = "paceline"
_SECRET = "PACELINE_SECRET"
_SECRET_BYTES = 32


def _ray_train() -> ModuleType:
    try:
        return import_module("ray.train.torch")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("ray"):
            raise
        raise ImportError(f'{__name__} needs Ray Train, which is not installed: pip install "ray[train]"') from error


_torch = _ray_train()
_TorchBackend: type[Any] = _torch.TorchConfig().backend_cls


def _prepare_worker(secret: str) -> None:
    """Prepares a worker. Runs on each worker before the process group is created."""
    register()  # the entry point registers the backend only where the package is installed
    os.environ.setdefault(_SECRET, secret)


class _Backend(_TorchBackend):  # type: ignore[misc]
    """Ray's backend class, modified to create the process group with Paceline."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_prepare_worker, backend_config.secret)
        super().on_start(worker_group, backend_config)


@dataclass
class PacelineConfig(_torch.TorchConfig):  # type: ignore[name-defined, misc]
    """Ray's `TorchConfig` for Paceline.

    Attributes:
        backend: The backend for `torch.distributed.init_process_group`.
        secret: The job's secret, used if PACELINE_SECRET is not set on the workers. Default: a new random secret for
            each trainer.
    """

    backend: str | None = NAME
    secret: str = field(default_factory=lambda: secrets.token_hex(_SECRET_BYTES), repr=False)

    @property
    def backend_cls(self) -> type[Any]:
        """The backend class that Ray instantiates before the training loop."""
        return _Backend


class TorchTrainer(_torch.TorchTrainer):  # type: ignore[name-defined, misc]
    """Ray's `TorchTrainer` with Paceline for collectives.

    Args:
        train_loop_per_worker: The function that each worker runs.
        torch_config: The configuration of the process group. Default: `PacelineConfig()`.
        arguments: Other arguments to Ray's `TorchTrainer`: `train_loop_config`, `scaling_config`, `run_config` etc.

    Raises:
        ValueError: the workers use GPUs. Paceline's backend does not reduce GPU tensors.
    """

    def __init__(self, train_loop_per_worker: Any, *, torch_config: Any = None, **arguments: Any) -> None:
        if torch_config is None:
            if getattr(arguments.get("scaling_config"), "use_gpu", False):
                raise ValueError(
                    "scaling_config has use_gpu=True, but the backend 'paceline' reduces CPU tensors only; use "
                    "ray.train.torch.TorchTrainer with its default, nccl, or use_gpu=False"
                )
            torch_config = PacelineConfig()
        super().__init__(train_loop_per_worker, torch_config=torch_config, **arguments)
