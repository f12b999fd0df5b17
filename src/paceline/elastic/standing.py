"""What a machine must be able to repeat about a worker: to a coordinator that lost touch with it, or to a new one."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.elastic.messages import Broken, Donating, Finished, FromWorker, Installed, Learned, Leaving, Ready

_LESSONS = 4  # that a donor may give at a time, and more


@dataclass
class Standing:
    """The messages of a worker that still matter, oldest first.

    A machine that meets a coordinator again, or for the first time, reports that it joined; then, for each worker that
    runs, that it started, and each of `messages` as if the worker had said it now; then the deaths that the
    coordinator may not know of. The coordinator answers with the view of today.
    """

    messages: list[FromWorker] = field(default_factory=list)

    def heard(self, message: FromWorker) -> None:
        """Takes the worker's next message."""
        match message:
            case Ready():
                self.messages = [each for each in self.messages if isinstance(each, Leaving)]
            case Installed():
                self._forget(Installed, Broken, Learned)
            case Learned():
                self._forget(Learned)
            case Donating():
                given = [each for each in self.messages if isinstance(each, Donating)]
                self.messages = [each for each in self.messages if each not in given[: 1 - _LESSONS]]
            case Broken():
                self._forget(Broken)
            case Leaving():
                self._forget(Leaving)
            case Finished():
                self._forget(Finished, Broken)
        self.messages.append(message)

    def _forget(self, *kinds: type[FromWorker]) -> None:
        self.messages = [each for each in self.messages if not isinstance(each, kinds)]
