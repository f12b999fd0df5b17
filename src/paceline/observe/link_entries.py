"""Takes an entry of a recording's links apart (native/record/layout.hpp, `LinkFields`)."""

from __future__ import annotations

from collections.abc import Callable

from paceline.observe.recording import Link


def link_of(entry: tuple[int, ...], time_ns: Callable[[int], int]) -> Link:
    """Returns the link of an entry as `layout.LINK` unpacks it; `time_ns` converts its tick."""
    _, group, peer, measured, sent, received, segments, rate, busy, held, trip, variation, least = entry[:13]
    retransmits, silent, connections = entry[13:]
    return Link(
        group=group,
        peer=peer,
        measured_ns=time_ns(measured),
        sent_nbytes=sent,
        received_nbytes=received,
        segments=segments,
        nbytes_per_s=rate,
        busy_s=busy / 1e6,
        held_s=held / 1e6,
        round_trip_s=trip / 1e6,
        variation_s=variation / 1e6,
        least_round_trip_s=least / 1e6,
        retransmits=retransmits,
        silent_s=silent / 1e3,
        connections=connections,
    )
