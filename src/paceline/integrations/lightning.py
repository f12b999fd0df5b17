"""Public name of `paceline.interop.integrations.lightning`: strategies for Lightning and Fabric."""

import sys

from paceline.interop.integrations import lightning
from paceline.interop.integrations.lightning import *  # noqa: F403

sys.modules[__name__] = lightning
