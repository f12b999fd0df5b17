"""Builds the package with scikit-build-core, after a sentence for those whose system Paceline does not run on.

pip shows the output of a build that fails, so what stands here is the last thing that a user of macOS or Windows reads.
"""

import sys

if sys.platform != "linux":
    sys.exit(
        f"Paceline runs on Linux only, and this is {sys.platform}: its core needs Linux's shared memory and futexes. "
        "On Windows install it in WSL 2, and on macOS in a Linux container."
    )

from build_progress import compilation_shown_on, pip_terminal
from scikit_build_core import build as backend
from scikit_build_core.build import (
    build_sdist,
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

Settings = dict[str, "str | list[str]"]


def build_wheel(
    wheel_directory: str, config_settings: "Settings | None" = None, metadata_directory: "str | None" = None
) -> str:
    """Builds the wheel as scikit-build-core does, and shows how many files have been compiled."""
    with compilation_shown_on(pip_terminal()):
        return backend.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: "Settings | None" = None, metadata_directory: "str | None" = None
) -> str:
    """Builds the wheel of an editable installation, like `build_wheel`."""
    with compilation_shown_on(pip_terminal()):
        return backend.build_editable(wheel_directory, config_settings, metadata_directory)
