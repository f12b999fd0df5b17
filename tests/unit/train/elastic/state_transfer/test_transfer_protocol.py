"""The division of a snapshot into chunks, and the senders that they come from."""

from __future__ import annotations

from elastic_lessons import Model
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.elastic.state_transfer.transfer_protocol import CHUNK_BYTES, ChunkLayout, MissingChunks


@given(st.integers(0, 30), st.integers(1, 4), st.randoms())
def test_every_chunk_comes_whoever_is_lost(count, senders, random):
    chunks, alive = MissingChunks(count), [f"d{at}" for at in range(senders)]
    asked: dict[str, int] = {}
    while not chunks.is_complete:
        sender = random.choice(alive)
        if sender in asked and len(alive) > 1 and random.random() < 0.2:
            alive.remove(sender)
            del asked[sender]
            chunks.lost(sender)
        elif sender in asked:
            chunks.arrived(asked.pop(sender))
        else:
            chunk = chunks.next_for(sender)
            assert chunk is not None, "an idle sender helps the others"
            asked[sender] = chunk
    assert chunks.next_for(alive[0]) is None


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 7))
def test_chunks_cover_the_buffers_once_and_in_order(sizes, chunk_bytes):
    layout = ChunkLayout(sizes, chunk_bytes)
    spans = [span for chunk in range(layout.count) for span in layout.spans(chunk)]
    covered = [(buffer, at) for buffer, first, stop in spans for at in range(first, stop)]
    assert covered == [(buffer, at) for buffer, size in enumerate(sizes) for at in range(size)]
    assert all(
        sum(stop - first for _, first, stop in layout.spans(each)) <= chunk_bytes for each in range(layout.count)
    )


def test_a_chunk_is_as_large_as_is_said():
    assert Model(1).module.weight.nbytes > CHUNK_BYTES
