"""Predictions are close to simulated runs of the schedules, and determine the choice of the algorithm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.schedule.algorithms import ALGORITHMS, COSTS, choose, explain_text, predict
from paceline.comm.schedule.cost_model import CostModel, LinkCost
from paceline.comm.schedule.network import Network
from paceline.comm.schedule.simulation import simulate_call
from paceline.comm.schedule.steps import Operation

MIB = 1 << 20
CLUSTER = CostModel(LinkCost(2e-6, 1 / 20e9), LinkCost(20e-6, 1 / 3e9), 1 / 10e9)
PAIRS = [(algorithm, operation) for algorithm in ALGORITHMS for operation in ALGORITHMS[algorithm]]


def hosts_of(n_hosts, ranks_a_host):
    return [range(first, first + ranks_a_host) for first in range(0, n_hosts * ranks_a_host, ranks_a_host)]


def test_every_offered_operation_has_a_closed_form():
    assert {name: set(forms) for name, forms in COSTS.items()} == {
        name: set(offered) for name, offered in ALGORITHMS.items()
    }


@pytest.mark.parametrize(("algorithm", "operation"), [pair for pair in PAIRS if pair[1] != Operation.BARRIER])
def test_prediction_and_simulation_differ_by_a_small_factor(algorithm, operation):
    """The simulation overlaps more, especially at a star's center, and pipelines long folds."""
    most = 4 if algorithm == "star" else 2.7
    for n_hosts, ranks_a_host in [(1, 2), (1, 8), (1, 13), (4, 1), (3, 4), (4, 4), (8, 4)]:
        hosts, world_size = hosts_of(n_hosts, ranks_a_host), n_hosts * ranks_a_host
        network = Network.of_costs(CLUSTER, tuple(map(tuple, hosts)))
        for nbytes in (64, 64 << 10, 4 * MIB):
            predicted = predict(CLUSTER, algorithm, operation, nbytes, world_size, hosts)
            simulated = simulate_call(algorithm, operation, nbytes, network).seconds
            assert simulated / 2.7 <= predicted <= simulated * most


def test_hierarchical_wins_for_long_tensors_on_several_hosts():
    assert choose(CLUSTER, Operation.ALL_REDUCE, 16 * MIB, 64, hosts_of(8, 8)).algorithm == "hierarchical"


def test_the_ring_is_close_to_hierarchical_for_long_tensors():
    """The ring's data also leaves each host once, but reductions within hosts do not overlap with exchanges."""
    choice = choose(CLUSTER, Operation.ALL_REDUCE, 1024 * MIB, 64, hosts_of(8, 8))
    ring = next(each.seconds for each in choice.candidates if each.algorithm == "ring")
    assert choice.algorithm == "hierarchical" and ring < 1.3 * choice.seconds


def test_halving_loses_for_long_tensors_where_its_rounds_overlap():
    hosts = hosts_of(4, 1)
    choice = choose(CLUSTER, Operation.ALL_REDUCE, 16 * MIB, 4, hosts)
    assert choice.algorithm in ("ring", "circulant", "hierarchical")
    halving = next(each.seconds for each in choice.candidates if each.algorithm == "halving_doubling")
    network = Network.of_costs(CLUSTER, tuple(map(tuple, hosts)))
    simulated = simulate_call("halving_doubling", Operation.ALL_REDUCE, 16 * MIB, network).seconds
    assert halving == pytest.approx(simulated, rel=0.15) and halving > 1.1 * choice.seconds


def test_several_messages_at_once_are_for_short_tensors():
    """Several messages save latency, but hide less of the reduction within hosts."""
    far = CostModel(LinkCost(2e-6, 1 / 20e9), LinkCost(5e-3, 1 / 1e9, 1e-5), 1 / 10e9)
    hosts = hosts_of(9, 2)
    assert choose(far, Operation.ALL_REDUCE, 64 << 10, 18, hosts).algorithm == "circulant"
    assert choose(far, Operation.ALL_REDUCE, 1024 * MIB, 18, hosts).algorithm == "hierarchical"


def test_the_ring_wins_where_a_fold_would_double_the_bytes():
    assert choose(CLUSTER, Operation.ALL_REDUCE, 256 * MIB, 13).algorithm in ("ring", "hierarchical")
    ring, folded = (
        predict(CLUSTER, name, Operation.ALL_REDUCE, 256 * MIB, 13) for name in ("ring", "halving_doubling")
    )
    assert ring < folded


@pytest.mark.parametrize("world_size", [4, 8, 16, 64])
def test_few_rounds_win_where_messages_are_dear(world_size):
    dear = CostModel(LinkCost(1e-3, 1 / 20e9), LinkCost(1e-3, 1 / 3e9), 1 / 10e9)
    assert choose(dear, Operation.ALL_REDUCE, 1024, world_size).algorithm in ("tree", "halving_doubling")


@pytest.mark.parametrize(
    "operation", [name for name in Operation if name not in (Operation.BARRIER, Operation.GATHER, Operation.SCATTER)]
)
@pytest.mark.parametrize("n_hosts", [1, 4])
def test_the_star_never_wins_a_long_tensor_on_many_ranks(operation, n_hosts):
    """In a gather or a scatter, all bytes cross the root's link anyway."""
    choice = choose(CLUSTER, operation, 64 * MIB, 32, hosts_of(n_hosts, 32 // n_hosts))
    assert choice.algorithm != "star"


@given(st.sampled_from(PAIRS), st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.integers(1, 9), st.integers(1, 9))
def test_more_bytes_never_take_less_time(pair, some, more, n_hosts, ranks_a_host):
    hosts, (algorithm, operation) = hosts_of(n_hosts, ranks_a_host), pair
    shorter, longer = (
        predict(CLUSTER, algorithm, operation, nbytes, n_hosts * ranks_a_host, hosts) for nbytes in sorted((some, more))
    )
    assert 0 <= shorter <= longer


@given(st.sampled_from(PAIRS), st.integers(0, 1 << 30))
def test_a_rank_alone_needs_no_time(pair, nbytes):
    assert predict(CLUSTER, *pair, nbytes, 1) == 0


def test_the_candidates_are_sorted_and_the_first_is_chosen():
    choice = choose(CLUSTER, Operation.ALL_REDUCE, MIB, 16, hosts_of(2, 8))
    times = [candidate.seconds for candidate in choice.candidates]
    assert times == sorted(times) and choice.algorithm == choice.candidates[0].algorithm
    assert len(choice.candidates) == len(ALGORITHMS)


def test_a_forced_algorithm_is_taken_and_the_better_one_named():
    choice = choose(CLUSTER, Operation.ALL_REDUCE, 64 * MIB, 16, hosts_of(2, 8), forced="star")
    assert choice.algorithm == "star"
    assert "star is forced" in choice.reason and "hierarchical" in choice.reason


def test_an_algorithm_that_cannot_be_forced_names_those_that_can():
    with pytest.raises(ValueError, match="tree does not support all_to_all; these do: ring"):
        choose(CLUSTER, Operation.ALL_TO_ALL, MIB, 16, forced="tree")
    with pytest.raises(ValueError, match="unknown algorithm 'rign'; the algorithms are ring"):
        choose(CLUSTER, Operation.ALL_REDUCE, MIB, 16, forced="rign")


def test_hosts_that_are_not_the_world_are_refused():
    with pytest.raises(ValueError, match=r"hosts of \(4, 4\) ranks do not add up to a world of 9"):
        predict(CLUSTER, "ring", Operation.ALL_REDUCE, MIB, 9, hosts_of(2, 4))


def test_the_explanation_shows_every_candidate():
    text = explain_text(choose(CLUSTER, Operation.ALL_REDUCE, 64 * MIB, 128, hosts_of(16, 8)))
    assert text.startswith("all_reduce of 67,108,864 bytes on 128 ranks, 16 hosts")
    assert "-> hierarchical" in text and all(name in text for name in ALGORITHMS)
    assert "hierarchical is predicted to be the fastest" in text
    assert "The star is slower by a factor of" in text and "127 other ranks" in text
