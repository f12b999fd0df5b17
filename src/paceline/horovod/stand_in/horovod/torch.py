"""Puts `paceline.horovod` in the place of this module, and says so on rank 0."""

import os
import sys

import paceline.horovod

_TOLD = "PACELINE_COMPAT_TOLD"  # also reaches the processes that the script starts

if os.environ.get("RANK", "0") == "0" and _TOLD not in os.environ:
    os.environ[_TOLD] = "1"
    print("paceline: --compat horovod: `import horovod.torch` is paceline.horovod", file=sys.stderr, flush=True)
sys.modules[__name__] = paceline.horovod
