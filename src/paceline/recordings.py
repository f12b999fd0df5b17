"""Public alias of `paceline.operate.diagnosis.recording_reader`: functions that read recordings."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.operate.diagnosis import recording_reader

if TYPE_CHECKING:
    from paceline.operate.diagnosis.recording_reader import *  # noqa: F403

sys.modules[__name__] = recording_reader
