"""Public name of `paceline.train.ddp.hooks`: communication hooks of DistributedDataParallel."""

import sys

from paceline.train.ddp import hooks
from paceline.train.ddp.hooks import *  # noqa: F403

sys.modules[__name__] = hooks
