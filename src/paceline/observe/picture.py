"""What one machine knows of its ranks at one moment, as JSON that launchers send each other and keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from paceline.observe.alignment import shifted
from paceline.observe.evidence import Call, Rank, Scene
from paceline.security.received import decoded

_MOST_CALLS = 8192  # of all ranks of a machine together that are sent to another one


@dataclass(frozen=True)
class Picture:
    """The ranks of one machine.

    Attributes:
        taken_s: the time on the machine's monotonic clock, of which all times in `ranks` are.
        stalled_since_s: since when a call of one of them lasts too long; None if none does.
    """

    taken_s: float
    ranks: tuple[Rank, ...]
    stalled_since_s: float | None = None


# It is made here, where no two threads can make it at the same time: that crashes msgspec 0.22.
_decoder = msgspec.json.Decoder(Picture)


def encode(picture: Picture) -> str:
    """Returns the picture as JSON, with as many calls as another machine needs."""
    most = _MOST_CALLS // max(8, len(picture.ranks))
    short = tuple(replace(rank, calls=_latest(rank.calls, most)) for rank in picture.ranks)
    return msgspec.json.encode(replace(picture, ranks=short)).decode()


def _latest(calls: tuple[Call, ...], most: int) -> tuple[Call, ...]:
    """Returns the latest calls, and earlier ones that are not over."""
    return (*(call for call in calls[:-most] if call.ended_s is None), *calls[-most:])


def decode(body: str) -> Picture:
    """Returns the picture in `body`.

    Raises:
        ValueError: there is none.
    """
    return decoded(_decoder.decode, body)


def scene_of(pictures: Iterable[Picture], word: str = "rank") -> Scene:
    """Returns the scene that pictures of several machines show, which were taken at the same time.

    Their clocks may differ; "now" is the same in all of them.
    """
    ranks = [shifted(rank, -picture.taken_s) for picture in pictures for rank in picture.ranks]
    return Scene(0.0, tuple(sorted(ranks, key=lambda rank: rank.rank)), word)
