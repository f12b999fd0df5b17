"""A worker without state: how it comes to take part, with a view at once or after a lesson."""

from __future__ import annotations

from functools import partial

from paceline.elastic.connection import LauncherConnection
from paceline.elastic.joining.learner import Learner, Taught
from paceline.elastic.messages import Dismissed, Learn, Ready, View

_MOST_LESSONS = 3  # that fail, after which the others have to wait while it gets the state


class Newcomer:
    """Asks to take part, and waits for the answer."""

    def __init__(self, connection: LauncherConnection) -> None:
        self._connection = connection
        self._ready = Ready("")
        self._failed = 0
        self._latest = 0  # the last lesson that it was given

    def ask(self, fingerprint: str, *, learns: bool) -> None:
        """Asks to take part; see `Ready`."""
        self._ready = Ready(fingerprint, learns)
        self._connection.send(self._ready)

    def ask_again(self) -> None:
        """Asks again, since a view or a lesson has failed."""
        self._ready = Ready(self._ready.fingerprint, self._failed < _MOST_LESSONS and self._ready.learns, self._latest)
        self._connection.send(self._ready)

    def has_failed(self, *, may_learn: bool) -> None:
        """Asks again after a lesson that led nowhere; unless it may learn, the others wait while it gets the state."""
        self._failed = self._failed + 1 if may_learn else _MOST_LESSONS
        self.ask_again()

    def await_way_in(self, after: int) -> View | Dismissed | Taught:
        """Waits for the next view after a generation, for the order to end, or for a lesson that succeeds.

        Raises:
            LauncherLostError: the launcher has ended.
        """
        while True:
            news = self._connection.await_news(partial(self._news, after))
            if not isinstance(news, Learn):
                return news
            self._latest = news.lesson
            learner = Learner(self._offers_now, lambda: self._has_a_place(after))
            if (taught := learner.learn()) is not None:
                return taught
            if not self._has_a_place(after):
                self.has_failed(may_learn=True)

    def _news(self, after: int) -> list[View | Dismissed | Learn]:
        """Returns the answer, or what donors offer in a lesson that is newer than the last one."""
        answer = self._answer(after)
        return (
            [answer] if answer is not None else [each for each in self._connection.offers if each.lesson > self._latest]
        )

    def _answer(self, after: int) -> View | Dismissed | None:
        dismissed = self._connection.dismissed
        return dismissed if dismissed is not None else self._connection.latest_view(after)

    def _has_a_place(self, after: int) -> bool:
        """Whether a lesson is needless, since this worker is in a view already, or was told to end."""
        answer = self._answer(after)
        return isinstance(answer, Dismissed) or (answer is not None and self._connection.name in answer.members)

    def _offers_now(self) -> list[Learn]:
        return [each for each in self._connection.offers if each.lesson == self._latest]
