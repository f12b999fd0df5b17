"""Handles Ctrl-Z: the workers, though in sessions of their own, stop and continue with the launcher."""

from __future__ import annotations

import signal
import time

from paceline.launch.keyboard import Keyboard
from paceline.launch.loop import Crew
from paceline.launch.signals import Signals


def pause(crew: Crew | None, keyboard: Keyboard, signals: Signals) -> None:
    """Stops the workers and this process; returns when the shell has continued it, and the workers with it.

    If a worker waits for typed input, the job continues in the foreground only, like any program that reads.
    """
    waits = crew is not None and crew.interactive() is not None
    attributes = keyboard.attributes()
    if crew is not None:
        crew.signal(signal.SIGSTOP)
    keyboard.restore()
    signals.stop_here(signal.SIGTSTP)
    while waits and not keyboard.is_ours():
        signals.stop_here(signal.SIGTTIN)
        time.sleep(0.05)
    keyboard.set(attributes)
    if crew is not None:
        crew.signal(signal.SIGCONT)
