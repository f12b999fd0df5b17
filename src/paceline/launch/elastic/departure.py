"""How a launcher of an elastic job ends that was asked to: with which farewell, and with which exit code."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from paceline.launch.nodes.messages import Departing, Leave, Report

ORDERLY = signal.SIGTERM  # has a machine leave at the end of a step, which is no failure


@dataclass
class Departure:
    """What is known of the end of this launcher, without a process or a clock.

    Attributes:
        is_shared: the job runs, or may, on other machines too.
        number: the signal that asks for it.
        insists: another one has come since.
        took_part: a worker of this machine has trained with others.
        has_left: the coordinator was told that the workers have ended.
    """

    is_shared: bool
    number: signal.Signals | None = None
    insists: bool = False
    took_part: bool = False
    has_left: bool = False

    def announced(self) -> list[Report]:
        """Returns what the coordinator is told at once."""
        return [Departing()] if self.number == ORDERLY else []

    def hands_over(self, coordinates: bool) -> bool:
        """Returns whether a launcher that coordinates the job, or does not, ends when it has handed that over."""
        return coordinates and self.number == ORDERLY and not self.insists

    def farewell(self, coordinates: bool) -> list[Report]:
        """Returns what the coordinator is told when no worker is left, once."""
        if self.number is None or self.has_left or self.hands_over(coordinates):
            return []
        self.has_left = True
        return [Leave(self.number.name)]

    def is_well(self, code: int) -> bool:
        """Returns whether all went as asked, when the job's end here has this code: others go on, or have finished."""
        has_gone = self.is_shared and (self.has_left or self.took_part)
        return code == 0 and self.number == ORDERLY and not self.insists and has_gone
