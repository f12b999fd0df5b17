"""Public alias of `paceline.interop.torch_backend`: the "paceline" backend for `torch.distributed`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.interop import torch_backend

if TYPE_CHECKING:
    from paceline.interop.torch_backend import *  # noqa: F403

sys.modules[__name__] = torch_backend
