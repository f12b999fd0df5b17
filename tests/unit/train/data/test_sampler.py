from __future__ import annotations

import itertools
import warnings

import pytest
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline import DistributedSampler


@settings(max_examples=examples(300), deadline=None)
@given(
    length=st.integers(0, 300),
    replicas=st.integers(1, 64),
    place=st.integers(0, 63),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**31),
    drop_last=st.booleans(),
    epoch=st.integers(0, 100),
)
def test_the_indices_are_those_of_torch(length, replicas, place, shuffle, seed, drop_last, epoch):
    arguments = (range(length), replicas, place % replicas, shuffle, seed, drop_last)
    ours, theirs = DistributedSampler(*arguments), torch.utils.data.DistributedSampler(*arguments)
    ours.set_epoch(epoch)
    theirs.set_epoch(epoch)
    assert len(ours) == len(theirs)
    if drop_last and length < replicas:
        # The samples cannot be divided evenly; torch's count is zero and its iterator may fail its own assertion.
        assert list(ours) == []
        return
    assert list(ours) == (list(theirs) if length else [])


def test_a_rank_out_of_range_is_refused_with_the_range():
    with pytest.raises(ValueError, match="rank is 2; with num_replicas 2 it must be from 0 to 1"):
        DistributedSampler(range(4), num_replicas=2, rank=2)


def test_without_a_group_the_fix_is_named():
    with pytest.raises(ValueError, match="init_process_group"):
        DistributedSampler(range(4))


def forget_nothing(sampler):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return list(sampler)


def test_a_second_epoch_in_the_same_order_is_reported_once():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=1)
    forget_nothing(sampler)
    with pytest.warns(UserWarning, match=r"rank 1: .* epoch 0 .*Call sampler\.set_epoch\(epoch\).*shuffle=False"):
        list(sampler)
    forget_nothing(sampler)


def test_epochs_left_in_their_second_half_count():
    sampler = DistributedSampler(range(20), num_replicas=2, rank=1)
    forget_nothing(sampler)
    reading = iter(sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            next(reading)
    with pytest.warns(UserWarning, match="set_epoch"):
        next(reading)


def test_looks_at_the_first_batches_are_no_epochs():
    sampler = DistributedSampler(range(80), num_replicas=2, rank=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for read in (4, 20):  # a loader's workers read a few batches ahead
            list(itertools.islice(sampler, read))
        for epoch in range(3):
            list(itertools.islice(sampler, 4))
            sampler.set_epoch(epoch)
            list(itertools.islice(sampler, 20))
            list(sampler)


def test_epochs_that_are_set_cause_no_warning():
    sampler = DistributedSampler(range(8), num_replicas=2, rank=1)
    next(iter(sampler))
    for epoch in (0, 1, 1):
        sampler.set_epoch(epoch)
        forget_nothing(sampler)


def test_a_fixed_order_causes_no_warning():
    in_order = DistributedSampler(range(8), num_replicas=2, rank=1, shuffle=False)
    forget_nothing(in_order)
    forget_nothing(in_order)


def test_a_data_loader_tells_of_a_forgotten_epoch():
    loader = torch.utils.data.DataLoader(range(8), sampler=DistributedSampler(range(8), num_replicas=2, rank=1))
    list(loader)
    with pytest.warns(UserWarning, match="set_epoch"):
        list(loader)
