"""Builds the package with scikit-build-core, or rejects unsupported operating systems with an explanation.

pip shows the output of a failed build, so on macOS and Windows this explanation is the last line that users see.
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
    """Builds the wheel with scikit-build-core, and shows the number of compiled files."""
    with compilation_shown_on(pip_terminal()):
        return backend.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: "Settings | None" = None, metadata_directory: "str | None" = None
) -> str:
    """Builds the wheel of an editable installation, like `build_wheel`."""
    with compilation_shown_on(pip_terminal()):
        return backend.build_editable(wheel_directory, config_settings, metadata_directory)
