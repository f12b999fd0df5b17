"""The failures that the user of an elastic job is shown at its end, whoever coordinates it then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.launch.failures import Failure, shortened

MOST = 64  # that are kept


@dataclass
class Blame:
    """Failures in the order in which they became known, each once."""

    failures: tuple[Failure, ...] = ()

    def add(self, failures: Iterable[Failure]) -> bool:
        """Adds failures; returns whether any is new. Beyond the first few they are too many to tell anybody more."""
        known = {(each.host, each.pid) for each in self.failures}
        new = [each for each in failures if (each.host, each.pid) not in known][: MOST - len(self.failures)]
        self.failures = shortened([*self.failures, *new])
        return bool(new)
