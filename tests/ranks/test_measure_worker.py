"""`paceline plan --measure`: hooks in a script, links between ranks, and the whole command."""

from __future__ import annotations

import json

import pytest
import torch
from forked_launcher import run_command
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.operate.plan.calibration import read
from paceline.operate.plan.measure_worker import FileBarrier, hosts_of, measure_link, measure_pairs, usual_link
from paceline.operate.plan.step_watch import StepWatch


class Clock:
    """A clock that advances only while a model computes."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow(torch.autograd.Function):
    """A layer whose backward pass takes some time."""

    @staticmethod
    def forward(ctx, x, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.seconds
        return gradient, None, None


class Model(nn.Module):
    """Two layers. Forward takes 3 s; backward takes 1 s before the second layer, and 2 s between the layers."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.clock = clock

    def forward(self, x):
        self.clock.now += 3.0
        hidden = Slow.apply(self.first(x), self.clock, 2.0)
        return Slow.apply(self.second(hidden), self.clock, 1.0)


@pytest.fixture
def watch_of():
    """Creates watches, whose hooks are removed at the end of the test."""
    made = []

    def make(clock, after_step=lambda watch: None):
        made.append(StepWatch(after_step, clock))
        return made[-1]

    yield make
    for each in made:
        each.close()


def train(model, clock, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for x in DataLoader(torch.randn(5 * steps, 4), batch_size=5):
        model(x).sum().backward()
        clock.now += 0.5
        optimizer.step()
        optimizer.zero_grad()


def test_each_gradient_is_noted_when_it_is_there(watch_of):
    clock = Clock()
    watch = watch_of(clock)
    train(Model(clock), clock, steps=5)
    assert len(watch.steps) == 3  # the first two steps are only used to find the modules
    for step in watch.steps:
        assert (step.forward_s, step.backward_s, step.samples) == ([3.0], [3.0], 5)
        assert step.ready_s == {"second.weight": 1.0, "first.weight": 3.0, "first.bias": 3.0}
        assert step.rest_s == pytest.approx(0.5)
        assert step.seconds == pytest.approx(6.5)


def test_accumulated_backwards_belong_to_one_step(watch_of):
    clock = Clock()
    watch = watch_of(clock)
    model, optimizer_steps = Model(clock), 5
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(optimizer_steps):
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert [len(step.backward_s) for step in watch.steps] == [3, 3, 3]
    assert watch.steps[-1].samples == 6


def test_evaluation_is_no_forward_of_a_step(watch_of):
    clock = Clock()
    watch = watch_of(clock)
    model = Model(clock)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(4):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(2, 4))
    assert [len(step.forward_s) for step in watch.steps] == [1, 1]


def test_a_watch_leaves_nothing_behind(watch_of):
    clock = Clock()
    watch = watch_of(clock)
    model = Model(clock)
    train(model, clock, steps=4)
    seen = len(watch.steps)
    watch.close()
    train(model, clock, steps=4)
    assert len(watch.steps) == seen
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_ranks_are_sorted_by_their_hosts():
    assert hosts_of(["a", "b", "a", "b"]) == [[0, 2], [1, 3]]


def test_ranks_that_measure_together_wait_for_all(tmp_path):
    first, second = (FileBarrier(tmp_path, rank, 2) for rank in range(2))
    assert not first.signal_and_wait("begun", timeout_s=0)
    assert second.signal_and_wait("begun", timeout_s=0)
    assert first.all_signaled("begun") and not first.all_signaled("measured")


def see_a_link() -> object:
    paceline.init_process_group()
    link = measure_link(0, 1)
    paceline.barrier()
    paceline.destroy_process_group()
    return link


def test_a_link_has_a_latency_and_a_rate(ranks):
    link, nothing = ranks(2)(see_a_link)
    assert nothing is None
    assert 0 < link.latency_s < 10
    assert 1e6 < link.bytes_per_s < 1e13


def see_all_links() -> object:
    paceline.init_process_group()
    pairs = measure_pairs([[0], [1], [2]])
    paceline.barrier()
    paceline.destroy_process_group()
    return pairs


def test_all_ranks_learn_the_link_of_every_pair(ranks):
    first, *others = ranks(3)(see_all_links)
    assert [(pair.first, pair.second) for pair in first] == [(0, 1), (0, 2), (1, 2)]
    assert all(pairs == first for pairs in others)
    rates = sorted(pair.link.bytes_per_s for pair in first)
    assert usual_link(first).bytes_per_s == rates[1] and rates[0] > 1e6
    assert usual_link([]) is None


SCRIPT = """
import sys
import torch
import paceline as dist
dist.init_process_group()
assert dist.get_world_size() == 1 and sys.argv[1:] == ["--width", "8"]
model = dist.DistributedDataParallel(torch.nn.Linear(8, 8), bucket_cap_mb=3)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
for step in range(1_000_000):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
open("finished", "w").close()
"""


def plan(directory, *words):
    return run_command("plan", *words, cwd=str(directory))


def test_a_script_is_measured_and_predicted(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    measuring = ("--measure", "--steps", "4", "--per-node", "2", "--links", "node=1gbit,0.1ms")
    done = plan(tmp_path, *measuring, "--", "train.py", "--width", "8")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "finished").exists()
    found = read(tmp_path / "calibration.json")
    assert found.origin.command == ("train.py", "--width", "8")
    assert (len(found.step_s), found.samples, found.forwards, found.origin.together) == (4, 4, 1, 2)
    assert [(each.name, each.nbytes) for each in found.gradients] == [("module.weight", 256), ("module.bias", 32)]
    assert found.memory.optimizer_nbytes == found.memory.parameter_nbytes == 288
    assert found.bucket_nbytes == (1 << 20, 3 << 20)
    assert found.links.node.bytes_per_s == 1e9 / 8 and {call.ranks for call in found.links.host_calls} == {2}
    predicting = ("--nodes", "1,2", "--per-node", "2", "--json", "--html", "plan.html")
    told = plan(tmp_path, "calibration.json", *predicting)
    assert told.returncode == 0, told.stderr
    assert [each["ranks_per_node"] for each in json.loads(told.stdout)["predictions"]] == [2, 2]
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
