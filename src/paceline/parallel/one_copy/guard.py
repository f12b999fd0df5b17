"""Keeps half-updated parameters from being used or saved as if they were whole."""

from __future__ import annotations

from torch import nn


class TornGuard:
    """A hook of a module that raises an error while `reason` says why its parameters are not whole.

    Copies of the module, which have parameters of their own, get a guard of their own without a reason.
    """

    def __init__(self) -> None:
        self.reason: str | None = None

    def __call__(self, *_: object) -> None:
        """Raises RuntimeError if there is a reason."""
        if self.reason is not None:
            raise RuntimeError(self.reason)

    def __reduce__(self) -> tuple[type[TornGuard], tuple[()]]:
        return TornGuard, ()

    def watch(self, module: nn.Module) -> None:
        """Makes forwards and `state_dict` of the module raise while there is a reason."""
        module.register_forward_pre_hook(self)
        module.register_state_dict_pre_hook(self)
