"""Fragments of the outer parameters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.train.diloco.outer_parameters import cut


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.data())
def test_fragments_are_runs_of_similar_size(sizes, data):
    fragments = data.draw(st.integers(1, len(sizes)))
    runs = cut(sizes, fragments)
    assert len(runs) == fragments
    assert all(len(run) > 0 for run in runs)
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    largest = max(sum(sizes[index] for index in run) for run in runs)
    assert largest <= sum(sizes) / fragments + 2 * max(sizes)
