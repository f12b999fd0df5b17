"""The parts of a shared model: slices, a guard, Lion, and the error in elastic jobs."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.train.shared_model.shared_shards import cut_evenly, divide_whole

PATIENTLY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SIZES = st.lists(st.integers(0, 3000), max_size=30)


@PATIENTLY
@given(SIZES, st.integers(1, 9), st.integers(1, 2000), st.sampled_from([1, 16, 64]))
def test_rounds_take_each_element_once_and_in_order(sizes, ranks, round_size, alignment):
    rounds = cut_evenly(sizes, ranks, round_size, alignment)
    elements = [(run.param, at) for each in rounds for owned in each for run in owned for at in (run.start, run.stop)]
    covered = [0] * len(sizes)
    for (param, start), (same, stop) in zip(elements[0::2], elements[1::2], strict=True):
        assert param == same
        assert start == covered[param] < stop
        covered[param] = stop
    assert covered == sizes
    assert elements == sorted(elements)


@PATIENTLY
@given(SIZES, st.integers(1, 9), st.integers(1, 2000), st.sampled_from([1, 16, 64]))
def test_slices_are_even_and_cut_at_cache_lines(sizes, ranks, round_size, alignment):
    rounds = cut_evenly(sizes, ranks, round_size, alignment)
    even = sum(sizes) / max(1, len(rounds) * ranks)
    for each in rounds:
        assert len(each) == ranks
        for owned in each:
            assert abs(sum(run.numel for run in owned) - even) <= alignment + 1
            assert all(run.start % alignment == 0 for run in owned)
            assert all(run.stop in (sizes[run.param], run.stop // alignment * alignment) for run in owned)


@PATIENTLY
@given(SIZES, st.integers(1, 9))
def test_whole_parameters_have_one_owner(sizes, ranks):
    (owned,) = divide_whole(sizes, ranks)
    assert len(owned) == ranks
    assert sorted(run for runs in owned for run in runs) == [(at, 0, size) for at, size in enumerate(sizes)]
