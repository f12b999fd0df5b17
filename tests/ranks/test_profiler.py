"""A program's calls in the output of `torch.profiler`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as torch_dist
from torch.profiler import ProfilerActivity, profile
from torch_programs import torch_group

import paceline

Event = tuple[str, tuple[tuple[int, ...], ...]]
EXPECTED: list[Event] = [
    ("all_gather", ((2, 3),)),
    ("all_reduce", ((2, 3),)),
    ("all_reduce", ((2, 3),)),
    ("all_to_all", ((1,), (1,))),
    ("barrier", ()),
    ("broadcast", ((2, 3),)),
    ("recv", ((2, 3),)),
    ("recvAnySource", ((2, 3),)),
    ("reduce_scatter", ((3,), (3,))),
    ("send", ((2, 3),)),
    ("send", ((2, 3),)),
]


def calls(of: object) -> list[Event]:
    """Runs each kind of call under the profiler; returns the recorded events, with tensor shapes."""
    rank = of.get_rank()
    mine, other = torch.ones(2, 3), 1 - rank
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        of.all_reduce(mine)
        work = of.all_reduce(mine, async_op=True)
        work.get_future().wait()
        of.broadcast(mine, 0)
        of.all_gather([torch.empty(2, 3), torch.empty(2, 3)], mine)
        of.reduce_scatter(torch.empty(3), [mine[0], mine[1]])
        of.all_to_all([torch.empty(1), torch.empty(1)], [torch.ones(1), torch.ones(1)])
        of.barrier()
        sending = of.isend(mine, other)
        of.recv(mine.clone(), other)
        sending.wait()
        sending = of.isend(mine, other)
        of.recv(mine.clone())
        sending.wait()
        of.barrier()
    of.all_reduce(mine)
    names = [event for event in profiled.events() if event.name.startswith("paceline:")]
    events = [(event.name[len("paceline:") :], tuple(map(tuple, event.input_shapes))) for event in names]
    events.remove(("barrier", ()))
    assert all(event.time_range.end > event.time_range.start for event in names)
    if torch.__version__ >= (2, 13):  # older versions omit asynchronous Python events
        assert all(event.is_async for event in names)
    return sorted(events)


def show_own() -> None:
    paceline.init_process_group()
    assert calls(paceline) == EXPECTED


def show_plug_in(directory: str) -> None:
    with torch_group("paceline", directory):
        assert calls(torch_dist) == EXPECTED


def show_failed() -> None:
    paceline.init_process_group()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        with pytest.raises(paceline.CollectiveMismatchError):
            paceline.all_reduce(torch.ones(3 + paceline.get_rank()))
        work = paceline.all_reduce(torch.ones(3 + paceline.get_rank()), async_op=True)
        with pytest.raises(paceline.CollectiveMismatchError):
            work.wait()
        paceline.barrier()
    names = sorted(event.name for event in profiled.events() if event.name.startswith("paceline:"))
    assert names == ["paceline:all_reduce", "paceline:all_reduce", "paceline:barrier"]


def test_a_profile_shows_calls_with_their_sizes(ranks):
    ranks(2)(show_own)


def test_a_profile_shows_calls_of_torch_distributed(ranks, tmp_path):
    ranks(2)(show_plug_in, str(tmp_path))


def test_a_profile_shows_calls_that_failed(ranks):
    ranks(2)(show_failed)
