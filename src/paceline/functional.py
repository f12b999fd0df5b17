"""Public alias of `paceline.comm.functional`: differentiable collectives."""

import sys

from paceline.comm import functional
from paceline.comm.functional import *  # noqa: F403

sys.modules[__name__] = functional
