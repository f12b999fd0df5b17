"""Tells a launcher's events as the page shows them: starts, deaths, new views, and what they cost."""

from __future__ import annotations

from paceline.observe.live.sample import Event

Fact = str | int | list[int]

TOLD_BY_ALL = frozenset({"wait", "view", "end"})
"""Kinds of events that the launchers of all machines tell, so that one of them is enough."""

_NUMBER = (1 << 32) - 1  # of a view within the term of its coordinator, which is in the bits above


class Story:
    """Turns events into what a person wants to read; without a clock."""

    def __init__(self) -> None:
        self._view = 0
        self._broken_s: float | None = None  # since when a worker is missing that has not been made up for

    def tell(self, event: str, facts: dict[str, Fact], now_s: float) -> list[Event]:
        """Returns what to show of an event that happens now, if anything."""
        match event:
            case "start":
                ranks = facts.get("ranks", [])
                assert isinstance(ranks, list)
                which = f"worker {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} workers, {ranks[0]} to {ranks[-1]}"
                number = facts.get("generation", 1)
                text = f"{which} started" if number == 1 else f"{which} started again, for the {number}. time"
                return [Event(now_s, "start" if number == 1 else "restart", text)]
            case "failure":
                return [
                    Event(
                        now_s, "failure", f"rank {facts.get('rank')} (process {facts.get('pid')}): {facts.get('how')}"
                    )
                ]
            case "ended":
                self._broken_s = now_s if self._broken_s is None else self._broken_s
                return [Event(now_s, "death", f"worker {facts.get('uid')}: {facts.get('how')}")]
            case "worker":
                return [Event(now_s, "join", f"worker {facts.get('uid')} begins as process {facts.get('pid')}")]
            case "installed":
                return self._entered(int(str(facts.get("view", 0))), now_s)
            case "wait":
                return [Event(now_s, "wait", str(facts.get("reason", "")))]
            case "end":
                code = facts.get("code", 0)
                return [
                    Event(now_s, "end", "the job has ended" if code == 0 else f"the job has failed, exit code {code}")
                ]
        return []

    def _entered(self, view: int, now_s: float) -> list[Event]:
        if view <= self._view:
            return []
        self._view = view
        cost_s = None if self._broken_s is None else round(now_s - self._broken_s, 3)
        self._broken_s = None
        return [Event(now_s, "view", f"view {view & _NUMBER}: the workers train together", cost_s)]
