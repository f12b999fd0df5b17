"""Public alias of `paceline.interop.horovod`: Horovod's interface, `import paceline.horovod as hvd`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.interop import horovod

if TYPE_CHECKING:
    from paceline.interop.horovod import *  # noqa: F403

sys.modules[__name__] = horovod
