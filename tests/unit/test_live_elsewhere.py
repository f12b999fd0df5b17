"""Ranks of other machines on the live page: what their launchers send, and when."""

from __future__ import annotations

import pytest
from simulated_training import Training

from paceline.launch.nodes.framing import decode as decode_message
from paceline.launch.nodes.framing import encode as encode_message
from paceline.launch.nodes.messages import Join, Seen, Wait, Watching
from paceline.launch.nodes.viewing import Viewing
from paceline.launch.outlook import decode, encode
from paceline.observe.live.lookout import Lookout
from paceline.observe.live.notes import Elsewhere, Notes
from paceline.observe.live.sample import Facts


class Inner:
    """A steering that decides nothing."""

    deadline_s = None

    def reported(self, node, report, now_s):
        return [(node, Wait("here"))]

    def ended(self, node, why, now_s):
        return []

    def lost(self, node, why, now_s, silent_s=0.0):
        return []

    def tick(self, now_s):
        return []


def join(serves: bool) -> Join:
    return Join("host", 1, "10.0.0.1", 1, 2, "default", None, serves, "1", False)


def test_others_are_asked_only_while_somebody_looks():
    viewing = Viewing(Inner())
    viewing.reported("a", join(True), 0.0)
    viewing.reported("b", join(False), 0.0)
    assert viewing.reported("a", Watching(True), 1.0) == [("b", Watching(True))]
    assert viewing.reported("c", join(False), 2.0) == [("c", Wait("here")), ("c", Watching(True))]
    assert viewing.reported("b", Seen("x"), 3.0) == [("a", Seen("x"))]
    viewing.lost("b", "gone", 4.0)
    assert viewing.reported("a", Watching(False), 5.0) == [("c", Watching(False))]
    assert viewing.reported("d", join(False), 6.0) == [("d", Wait("here"))]


@pytest.mark.parametrize("message", [Watching(True), Seen('[{"rank": 1}]')])
def test_the_messages_travel(message):
    assert decode_message(encode_message(message)[4:]) == message


def test_what_is_sent_is_small_and_on_the_pages_clock():
    training = Training(8)
    training.run(3.0)
    training.look()
    training.run(1.0)
    ranks = training.look().ranks
    body = encode(ranks, 1000.0)
    assert len(body) / len(ranks) < 4096
    told = decode(body)
    assert [each.rank for each in told] == list(range(8))
    assert told[3].steps[-1].begin_s == pytest.approx(ranks[3].steps[-1].begin_s + 1000, abs=1e-5)
    assert told[3].steps[-1].duration_s == pytest.approx(ranks[3].steps[-1].duration_s, abs=1e-5)
    assert told[3].steps[-1].buckets and not told[3].steps[0].buckets
    with pytest.raises(ValueError, match="int"):
        decode('[{"rank": "one"}]')


def test_samples_from_elsewhere_are_taken_once():
    training = Training(2)
    training.run(1.0)
    notes = Notes()
    lookout = Lookout(notes, Facts("job", world_size=2))
    for _ in range(2):
        training.run(0.5)
        notes.leave(Elsewhere(decode(encode(training.look().ranks, 0.0))))
    sample = lookout.look()
    numbers = [step.step for step in sample.ranks[1].steps]
    assert numbers == sorted(set(numbers)) and len(numbers) > 10
    assert lookout.look().ranks[1].steps == ()
    lookout.close()
