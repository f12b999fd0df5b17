"""Public alias of `paceline.operate.diagnosis.recording_reader`: functions that read recordings."""

import sys

from paceline.operate.diagnosis import recording_reader
from paceline.operate.diagnosis.recording_reader import *  # noqa: F403

sys.modules[__name__] = recording_reader
