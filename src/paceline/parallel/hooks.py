"""Public name of `paceline.train.ddp.hooks`: communication hooks of DistributedDataParallel."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.train.ddp import hooks

if TYPE_CHECKING:
    from paceline.train.ddp.hooks import *  # noqa: F403

sys.modules[__name__] = hooks
