"""Public alias of `paceline.comm.functional`: differentiable collectives."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.comm import functional

if TYPE_CHECKING:
    from paceline.comm.functional import *  # noqa: F403

sys.modules[__name__] = functional
