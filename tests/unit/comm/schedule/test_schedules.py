"""Every algorithm correctly implements every operation that it offers, in worlds of every size."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline.comm.schedule import circulant
from paceline.comm.schedule.algorithms import ALGORITHMS, algorithms_offering, build
from paceline.comm.schedule.steps import ROOTED, Operation
from paceline.comm.schedule.verify import verify

BY_HOSTS = ("hierarchical", "circulant")  # these require the placement on hosts

BY_HOSTS_PAIRS = [(algorithm, operation) for algorithm in BY_HOSTS for operation in ALGORITHMS[algorithm]]

FLAT = [name for name in ALGORITHMS if name not in BY_HOSTS]

PAIRS = [(algorithm, operation) for algorithm in ALGORITHMS for operation in ALGORITHMS[algorithm]]

SMALL, LARGE = range(1, 41), range(41, 131)

# The suite uses the sizes next to powers of two, a prime, the smallest, the largest, and one in between.
SOME_LARGE = [41, 63, 64, 65, 80, 113, 127, 128, 129, 130]

ALL_LARGE = pytest.param(LARGE, marks=[pytest.mark.soak, pytest.mark.timeout(1800)], id="all")

# The sizes with which the suite tries every operation, root and division into hosts. The largest worlds take as long as
# all the others together.
SOME_SMALL = [*range(1, 18), 20, 23, 24, 27, 32, 36]

SMALL_SIZES = pytest.mark.parametrize(
    "sizes", [pytest.param(SOME_SMALL, id="some"), pytest.param(SMALL, id="all", marks=pytest.mark.soak)]
)

SIZES = pytest.mark.parametrize("sizes", [pytest.param(SOME_LARGE, id="some"), ALL_LARGE])


@pytest.fixture(autouse=True, scope="module")
def _no_garbage_collector():
    """Schedules have no cycles, and consist of so many tuples that scanning them takes a third of the time."""
    gc.disable()
    yield
    gc.enable()


def world(algorithm, operation, world_size, root=-1, hosts=None):
    return [build(algorithm, operation, rank, world_size, root, hosts) for rank in range(world_size)]


def roots_of(operation, world_size):
    few = {world_size // 3, world_size - 1} if world_size > 16 else {0, world_size // 2, world_size - 1}
    return sorted(few) if operation in ROOTED else [-1]


def equal_hosts(world_size, ranks_a_host):
    return [range(first, min(first + ranks_a_host, world_size)) for first in range(0, world_size, ranks_a_host)]


def divisors(number):
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@SMALL_SIZES
@pytest.mark.parametrize(("algorithm", "operation"), [pair for pair in PAIRS if pair[0] in FLAT])
def test_every_world_up_to_40_ends_right(algorithm, operation, sizes):
    for world_size in sizes:
        for root in roots_of(operation, world_size):
            verify(world(algorithm, operation, world_size, root))


@pytest.fixture
def two_segments(monkeypatch):
    """Limits schedules to two segments. The segments are alike, so more would only make the proof take longer."""
    monkeypatch.setattr(circulant, "LONG", circulant.LONG._replace(segments=2))


@pytest.mark.usefixtures("two_segments")
@SMALL_SIZES
@pytest.mark.parametrize(("algorithm", "operation"), BY_HOSTS_PAIRS)
def test_every_split_into_equal_hosts_up_to_40_ends_right(algorithm, operation, sizes):
    for world_size in sizes:
        for ranks_a_host in divisors(world_size):
            roots = roots_of(operation, world_size)
            root = roots[ranks_a_host % len(roots)]
            verify(world(algorithm, operation, world_size, root, equal_hosts(world_size, ranks_a_host)))


@pytest.mark.usefixtures("two_segments")
@SMALL_SIZES
@pytest.mark.parametrize(("algorithm", "operation"), BY_HOSTS_PAIRS)
def test_every_world_up_to_40_with_a_smaller_last_host_is_right(algorithm, operation, sizes):
    for world_size in sizes[2:]:
        for ranks_a_host in {2, 3, 8, world_size // 2 + 1}:
            root = roots_of(operation, world_size)[-1]
            verify(world(algorithm, operation, world_size, root, equal_hosts(world_size, ranks_a_host)))


@SIZES
@pytest.mark.parametrize("algorithm", FLAT)
def test_all_reduce_ends_right_in_worlds_up_to_130(algorithm, sizes):
    for world_size in sizes:
        verify(world(algorithm, Operation.ALL_REDUCE, world_size))


@SIZES
@pytest.mark.usefixtures("two_segments")
@pytest.mark.parametrize("algorithm", BY_HOSTS)
def test_all_reduce_by_hosts_ends_right_up_to_130_ranks(algorithm, sizes):
    for world_size in sizes:
        even = [divisor for divisor in divisors(world_size) if 1 < divisor <= 12]
        hosts = equal_hosts(world_size, even[-1] if even else 8)
        verify(world(algorithm, Operation.ALL_REDUCE, world_size, hosts=hosts))


@pytest.mark.parametrize(("algorithm", "operation"), [pair for pair in PAIRS if pair[1] != Operation.ALL_REDUCE])
def test_larger_worlds_end_right(algorithm, operation):
    root = 41 if operation in ROOTED else -1
    verify(world(algorithm, operation, 107, root, equal_hosts(107, 8)))


@st.composite
def topologies(draw, most=48):
    """Generates ranks in any order on hosts of any size."""
    ranks = draw(st.permutations(range(draw(st.integers(1, most)))))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(ranks) - 1)), max_size=8)))
    hosts = [ranks[first:last] for first, last in zip([0, *cuts], [*cuts, len(ranks)], strict=True)]
    return [host for host in hosts if host]


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(topologies(), st.sampled_from(BY_HOSTS_PAIRS), st.integers(0, 1000))
def test_any_ranks_on_any_hosts_end_right(hosts, pair, root):
    world_size, (algorithm, operation) = sum(map(len, hosts)), pair
    verify(world(algorithm, operation, world_size, root % world_size if operation in ROOTED else -1, hosts))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 6),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
    st.sampled_from(BY_HOSTS_PAIRS),
)
def test_rails_of_shuffled_ranks_end_right(n_hosts, ranks_a_host, random, pair):
    algorithm, operation = pair
    ranks = random.sample(range(n_hosts * ranks_a_host), n_hosts * ranks_a_host)
    hosts = [ranks[host::n_hosts] for host in range(n_hosts)]
    root = ranks[0] if operation in ROOTED else -1
    verify(world(algorithm, operation, len(ranks), root, hosts))


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(131, 600), st.sampled_from(["tree", "star"]), st.integers(0, 1000), st.data())
def test_worlds_up_to_600_end_right(world_size, algorithm, root, data):
    operations = [
        name
        for name in ALGORITHMS[algorithm]
        if name in (Operation.ALL_REDUCE, Operation.BROADCAST, Operation.REDUCE, Operation.BARRIER)
    ]
    operation = data.draw(st.sampled_from(operations))
    verify(world(algorithm, operation, world_size, root % world_size if operation in ROOTED else -1))


@settings(max_examples=examples(4), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(131, 300), st.sampled_from(["halving_doubling", *BY_HOSTS]), st.integers(2, 16))
def test_all_reduce_in_worlds_up_to_300_ends_right(world_size, algorithm, ranks_a_host):
    verify(world(algorithm, Operation.ALL_REDUCE, world_size, hosts=equal_hosts(world_size, ranks_a_host)))


def test_one_rank_of_ten_thousand_gets_its_schedule():
    """Building the 39,996 steps of the ring took 47 ms; `bench/schedules.py` measures this time."""
    hosts = equal_hosts(10_000, 8)
    counts = {name: len(build(name, Operation.ALL_REDUCE, 7_777, 10_000, hosts=hosts).steps) for name in ALGORITHMS}
    assert counts["ring"] == 4 * 9_999
    assert counts["hierarchical"] < 1200 and counts["circulant"] < 500
    assert max(counts["halving_doubling"], counts["tree"], counts["star"]) < 100


@pytest.mark.parametrize("operation", Operation)
def test_the_ring_has_every_operation(operation):
    assert "ring" in algorithms_offering(operation)
