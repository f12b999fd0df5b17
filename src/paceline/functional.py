"""Public name of `paceline.comm.functional`: collectives through which gradients flow."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.comm import functional

if TYPE_CHECKING:
    from paceline.comm.functional import *  # noqa: F403

sys.modules[__name__] = functional
