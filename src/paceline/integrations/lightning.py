"""Public name of `paceline.interop.integrations.lightning`: strategies for Lightning and Fabric."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.interop.integrations import lightning

if TYPE_CHECKING:
    from paceline.interop.integrations.lightning import *  # noqa: F403

sys.modules[__name__] = lightning
