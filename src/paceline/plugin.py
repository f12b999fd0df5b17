"""Public alias of `paceline.interop.torch_backend`: the "paceline" backend for `torch.distributed`."""

import sys

from paceline.interop import torch_backend
from paceline.interop.torch_backend import *  # noqa: F403

sys.modules[__name__] = torch_backend
