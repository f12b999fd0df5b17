"""Public name of `paceline.interop.integrations.ray`: a trainer for Ray Train."""

import sys

from paceline.interop.integrations import ray
from paceline.interop.integrations.ray import *  # noqa: F403

sys.modules[__name__] = ray
