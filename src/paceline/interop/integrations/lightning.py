"""`strategy="paceline"` for Lightning's `Trainer` and for Fabric; importing this module registers it.

Example::

    import paceline.integrations.lightning
    from lightning.pytorch import Trainer

    trainer = Trainer(accelerator="cpu", devices=2, strategy="paceline")

The strategies are subclasses of Lightning's DDP strategies that use Paceline as the torch.distributed backend.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from paceline.interop.torch_backend import register

NAME = "paceline"
_DESCRIPTION = "DistributedDataParallel over Paceline's collectives"


def _first_of(*names: str) -> ModuleType:
    """Imports and returns the first of these modules that is installed."""
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
    raise ImportError(f'strategy="{NAME}" needs Lightning, which is not installed: pip install lightning')


_pytorch = _first_of("lightning.pytorch.strategies", "pytorch_lightning.strategies")
_fabric = _first_of("lightning.fabric.strategies", "lightning_fabric.strategies")


class PacelineStrategy(_pytorch.DDPStrategy):  # type: ignore[name-defined, misc]
    """A strategy for `Trainer`. Accepts the arguments of Lightning's `DDPStrategy` except `process_group_backend`."""

    strategy_name = NAME

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, process_group_backend=NAME, **kwargs)


class PacelineFabricStrategy(_fabric.DDPStrategy):  # type: ignore[name-defined, misc]
    """A strategy for Fabric. Accepts the arguments of Fabric's `DDPStrategy` except `process_group_backend`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, process_group_backend=NAME, **kwargs)


register()  # the entry point registers the backend only where the package is installed
for _registry, _strategy in (
    (_pytorch.StrategyRegistry, PacelineStrategy),
    (_fabric.STRATEGY_REGISTRY, PacelineFabricStrategy),
):
    _registry.register(NAME, _strategy, description=_DESCRIPTION, override=True)
