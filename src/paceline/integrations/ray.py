"""Public name of `paceline.interop.integrations.ray`: a trainer for Ray Train."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.interop.integrations import ray

if TYPE_CHECKING:
    from paceline.interop.integrations.ray import *  # noqa: F403

sys.modules[__name__] = ray
