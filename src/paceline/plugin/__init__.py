"""Paceline as a backend of torch.distributed: `torch.distributed.init_process_group("paceline")`.

May use: `group` and below. Start reading at `process_group.py`. PyTorch finds `register` by an entry point and calls it
at the end of `import torch`, so it imports nothing else and never raises.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def register() -> None:
    """Registers the backend "paceline" with torch.distributed; has no effect where that is not possible."""
    try:
        import torch.distributed as torch_dist

        if not torch_dist.is_available() or "paceline" in torch_dist.Backend.backend_list:
            return
        torch_dist.Backend.register_backend("paceline", _create, extended_api=True, devices=["cpu"])
        if find_spec("torch.distributed._dist2") is not None:  # releases 2.8 to 2.13
            import_module("torch.distributed._dist2").register_backend("paceline", _create_alone)
        if "torch" in os.environ.get("PACELINE_COMPAT", "").split(","):  # from `paceline run --compat torch`
            import_module("paceline.plugin.compat").take_over()
        if os.environ.get("PACELINE_TORCH_STORE"):  # from `paceline run`, which serves torch's store at MASTER_PORT
            import_module("paceline.plugin.launchers_store").take_over()
        if os.environ.get("PACELINE_PORT"):
            import_module("paceline.plugin.one_port").take_over()
    except Exception as error:
        import logging

        # This is no warning, since a filter can turn warnings into errors, and one here would break `import torch`.
        logging.getLogger(__name__).warning("torch.distributed does not get the backend 'paceline': %r", error)


def _create(options: object, pg_options: object = None) -> object:
    from paceline.plugin.joining import create

    return create(options, pg_options)


def _create_alone(store: Any, rank: int, world_size: int, timeout: Any, device: Any, **options: object) -> object:
    from paceline.plugin.joining import create_alone

    return create_alone(store, rank, world_size, timeout, device, options)


def lend_default_group() -> None:
    """Makes torch.distributed's default group, with the backend "paceline", from the ranks of Paceline's default group.

    Every rank calls this after `paceline.init_process_group()`. The ranks meet over Paceline's store, so the variables
    and the port that torch's own `env://` needs are not used. End torch's group first, with
    `torch.distributed.destroy_process_group()`.

    Raises:
        ValueError: Paceline's default group does not exist, or torch's exists already.
    """
    from paceline.plugin.lending import lend

    register()
    lend()
