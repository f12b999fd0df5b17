"""Paceline: distributed data-parallel training for PyTorch. `import paceline as dist`.

This file only re-exports. Names are loaded on first use, so that `paceline run` starts without importing torch;
`__init__.pyi` beside it spells the same list out for type checkers, and a test holds the two together.
"""

from __future__ import annotations

from importlib import import_module

_PUBLIC = {
    "paceline.errors": (
        "AuthenticationError",
        "CollectiveError",
        "CollectiveMismatchError",
        "CollectiveTimeoutError",
        "PacelineError",
        "PeerLostError",
        "RendezvousError",
        "RendezvousTimeoutError",
        "StoreConnectionError",
        "StoreError",
        "StoreTimeoutError",
        "WorkerError",
    ),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value: object = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
