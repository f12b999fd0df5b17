"""What is worth saying at the end of a job that went well: ranks that came late as a rule, and a slow network."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.observe.alignment import aligned
from paceline.observe.picture import Picture, scene_of
from paceline.observe.stragglers import worth_telling
from paceline.observe.transfers import slow_network


def lateness(pictures: Iterable[Picture], word: str = "rank") -> list[str]:
    """Returns a sentence for each; usually none."""
    seen = scene_of(pictures).ranks
    ranks = aligned(seen, [rank.host for rank in seen])
    return [each.sentence for each in (*worth_telling(ranks, word), *slow_network(ranks))]
