"""Public alias of `paceline.interop.horovod`: Horovod's interface, `import paceline.horovod as hvd`."""

import sys

from paceline.interop import horovod
from paceline.interop.horovod import *  # noqa: F403

sys.modules[__name__] = horovod
