"""Builds the package with scikit-build-core, after a sentence for those whose system Paceline does not run on.

pip shows the output of a build that fails, so what stands here is the last thing that a user of macOS or Windows reads.
"""

import sys

if sys.platform != "linux":
    sys.exit(
        f"Paceline runs on Linux only, and this is {sys.platform}: its core needs Linux's shared memory and futexes. "
        "On Windows install it in WSL 2, and on macOS in a Linux container."
    )

from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]
