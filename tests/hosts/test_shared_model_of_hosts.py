"""SharedModelOptimizer on several hosts, each of which has one copy of the model."""

from __future__ import annotations

import pytest
import torch
from one_world import OneWorld, name_of
from shared_training import backward, build, pair, train

import paceline as dist


def every_host_has_the_same_model() -> None:
    for optimizer_class in (torch.optim.AdamW, torch.optim.Adafactor):
        model, shared, reference, optimizer = pair("mlp", optimizer_class, lr=0.01)
        train(model, shared, "mlp", before=lambda: shared.clip_grad_norm_(1e9))  # noqa: B023
        train(model, shared, "mlp")
        for _ in range(2):
            train(reference, optimizer, "mlp")
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
            everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, mine.detach())
            assert all(torch.equal(each, everyone[0]) for each in everyone)
        shared.consolidate_state_dict(to=3)
        if dist.get_rank() == 3:
            mine, other = (each.state_dict()["state"] for each in (shared, optimizer))
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
        with shared.full_parameters():
            for param in model.parameters():
                param.data.fill_(dist.get_rank())
        assert all(bool((param == 0).all()) for param in model.parameters())


def hosts_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the hosts have \[2, 1\] ranks"):
        dist.SharedModelOptimizer(build(), torch.optim.SGD, lr=0.1)


def writing_on_another_host_is_refused() -> None:
    model, shared, _, _ = pair("mlp", torch.optim.SGD, lr=0.1)
    backward(model, "mlp", 0)
    if dist.get_rank() == 2:
        with torch.no_grad():
            model.get_parameter("2.bias").zero_()
    with pytest.raises(RuntimeError, match=r"rank 2 wrote to parameter '2\.bias'"):
        shared.step()


EVEN = OneWorld(every_host_has_the_same_model, writing_on_another_host_is_refused)
UNEVEN = OneWorld(hosts_of_other_sizes_are_refused)


@pytest.mark.parametrize("name", [name_of(each) for each in EVEN.programs.values()])
def test_two_hosts_of_two_ranks(hosts, name):
    EVEN.require((2, 2), name)


def test_hosts_of_different_sizes_are_refused(hosts):
    UNEVEN.require((2, 1), "hosts_of_other_sizes_are_refused")
