"""Arguments from Python never terminate the process: each batch of calls runs on its own ranks, which must survive.

A seed determines each batch. The ranks usually choose the same arguments, and sometimes different ones. They record
each call before they make it, so the last recorded call of a dead rank is the one that terminated it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from hostile import SOON, Hostile, Journal, last_line, shown
from sampling import examples
from torch.distributed import ReduceOp
from torch_programs import torch_group
from world import RankFailed

import paceline

CALLS = 120
CALLS_AFTER_THE_END = 5  # after the end of a group
PATIENCE = timedelta(seconds=0.3)
MOST_S = 90

# These calls destroy the group, or form another group and require that all ranks take part.
ENDS = {"abort", "shutdown", "shrink", "reconfigure", "merge_remote_group", "split_group"}

Arguments = Callable[[], Sequence[object]]
Surface = dict[str, tuple[Callable[..., object], Arguments]]


def one() -> torch.Tensor:
    return torch.ones(4)


def pair(count: int = 4) -> list[torch.Tensor]:
    return [torch.ones(count), torch.ones(count)]


def other() -> int:
    return 1 - int(os.environ["RANK"])


def if_root(value: object, otherwise: object) -> object:
    return value if os.environ["RANK"] == "0" else otherwise


def functions(dist: Any) -> Surface:
    """Returns the calls that torch.distributed and Paceline have in common, with valid arguments."""

    def exchange(ops: Any) -> None:
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    right: dict[str, Arguments] = {
        "all_reduce": lambda: [one(), ReduceOp.SUM, None, False],
        "broadcast": lambda: [one(), 0, None, False],
        "reduce": lambda: [one(), 0, ReduceOp.SUM, None, False],
        "all_gather": lambda: [pair(), one(), None, False],
        "all_gather_into_tensor": lambda: [torch.ones(8), one(), None, False],
        "gather": lambda: [one(), if_root(pair(), None), 0, None, False],
        "scatter": lambda: [one(), if_root(pair(), None), 0, None, False],
        "reduce_scatter": lambda: [one(), pair(), ReduceOp.SUM, None, False],
        "reduce_scatter_tensor": lambda: [one(), torch.ones(8), ReduceOp.SUM, None, False],
        "all_to_all": lambda: [pair(), pair(), None, False],
        "all_to_all_single": lambda: [one(), one(), [2, 2], [2, 2], None, False],
        "all_reduce_coalesced": lambda: [pair(), ReduceOp.SUM, None, False],
        "all_gather_coalesced": lambda: [[pair(), pair()], pair(), None, False],
        "isend": lambda: [one(), other(), None, 0],
        "irecv": lambda: [one(), other(), None, 0],
        "send": lambda: [one(), other(), None, 0],
        "recv": lambda: [one(), other(), None, 0],
        "broadcast_object_list": lambda: [[one(), 1], 0],
        "all_gather_object": lambda: [[None, None], one()],
        "monitored_barrier": lambda: [None, PATIENCE],
    }
    surface: Surface = {name: (getattr(dist, name), arguments) for name, arguments in right.items()}
    surface["P2POp"] = (dist.P2POp, lambda: [dist.isend, one(), other(), None, 0])
    surface["batch_isend_irecv"] = (
        exchange,
        lambda: [[dist.P2POp(dist.isend, one(), other()), dist.P2POp(dist.irecv, one(), other())]],
    )
    return surface


def methods(group: Any) -> Surface:
    """Returns all methods of the plug-in's groups; those that move tensors have valid arguments."""
    right: dict[str, Arguments] = {
        "allreduce": lambda: [[one()], torch_dist.AllreduceOptions()],
        "allreduce_coalesced": lambda: [pair(), torch_dist.AllreduceCoalescedOptions()],
        "broadcast": lambda: [[one()], torch_dist.BroadcastOptions()],
        "reduce": lambda: [[one()], torch_dist.ReduceOptions()],
        "allgather": lambda: [[pair()], [one()], torch_dist.AllgatherOptions()],
        "allgather_coalesced": lambda: [[pair(), pair()], pair(), torch_dist.AllgatherOptions()],
        "gather": lambda: [if_root([pair()], []), [one()], torch_dist.GatherOptions()],
        "scatter": lambda: [[one()], if_root([pair()], []), torch_dist.ScatterOptions()],
        "reduce_scatter": lambda: [[one()], [pair()], torch_dist.ReduceScatterOptions()],
        "alltoall": lambda: [pair(), pair(), torch_dist.AllToAllOptions()],
        "barrier": lambda: [torch_dist.BarrierOptions()],
        "monitored_barrier": lambda: [PATIENCE, True],
        "send": lambda: [[one()], other(), 0],
        "recv": lambda: [[one()], other(), 0],
        "recv_anysource": lambda: [[one()], 0],
        "set_timeout": lambda: [PATIENCE],
        "_get_backend": lambda: [torch.device("cpu")],
        "_start_coalescing": lambda: [torch.device("cpu")],
        "_end_coalescing": lambda: [torch.device("cpu")],
        "register_abort_hook": lambda: [0, print],
    }
    for name in ("all_gather_single", "_allgather_base"):
        right[name] = lambda: [torch.ones(8), one()]
    for name in ("reduce_scatter_single", "_reduce_scatter_base", "gather_single", "gather_into_tensor"):
        right[name] = lambda: [one(), torch.ones(8)]
    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
        right[name] = lambda: [pair(8), pair()]
    for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
        right[name] = lambda: [pair(), pair(8)]
    for name in ("all_to_all_single", "alltoall_base"):
        right[name] = lambda: [one(), one(), [], []]
    nothing: Arguments = list
    surface: Surface = {}
    for name in dir(group):
        with suppress(RuntimeError):  # a property that this group does not support raises it
            method = getattr(group, name)
            if callable(method) and not isinstance(method, type) and not name.startswith("__") and name not in ENDS:
                surface[f"group.{name}"] = method, right.get(name, nothing)
    return surface


def operators(group: Any) -> Surface:
    """Returns the operators to which compiled and functional programs pass a group's name."""
    by_name, ops = group.group_name, torch.ops._c10d_functional
    right: dict[str, Arguments] = {
        "all_reduce": lambda: [one(), "sum", by_name],
        "all_reduce_": lambda: [one(), "sum", by_name],
        "all_reduce_coalesced": lambda: [pair(), "sum", by_name],
        "all_gather_into_tensor": lambda: [one(), 2, by_name],
        "all_gather_into_tensor_coalesced": lambda: [pair(), 2, by_name],
        "reduce_scatter_tensor": lambda: [one(), "sum", 2, by_name],
        "reduce_scatter_tensor_coalesced": lambda: [pair(), "sum", 2, by_name],
        "all_to_all_single": lambda: [one(), [2, 2], [2, 2], by_name],
        "broadcast": lambda: [one(), 0, by_name],
    }

    def waited(op: Callable[..., Any], *arguments: object) -> None:
        made = op(*arguments)
        for tensor in made if isinstance(made, list) else [made]:
            ops.wait_tensor(tensor)

    return {
        f"op.{name}": (partial(waited, getattr(ops, name)), arguments)
        for name, arguments in right.items()
        if hasattr(ops, name)
    }


def worry(work: Any, hostile: Hostile, journal: Journal) -> None:
    """Calls methods of a Work, and then waits for it or drops it."""
    for _ in range(hostile.random.randrange(3)):
        name = hostile.random.choice(
            ["is_completed", "is_success", "exception", "source_rank", "boxed", "get_future", "result", "wait"]
        )
        arguments = hostile.random.choice([[], [], [hostile.value()], [hostile.random.choice(SOON)]])
        attempt(f"work.{name}", getattr(work, name, list), arguments, journal)
    if hostile.random.random() < 0.7:
        attempt("work.wait", work.wait, [], journal)


def attempt(name: str, function: Callable[..., object], arguments: Sequence[object], journal: Journal) -> object:
    journal.note(f"{name}({', '.join(map(shown, arguments))})")
    try:
        return function(*arguments)
    except Exception as error:  # regardless of the error, the process must survive
        journal.note(f"    {type(error).__name__}: {error}"[:300])
        return None


def make_calls(surface: Surface, seed: int, journal: Journal, is_over: Callable[[], bool], ready: Any) -> None:
    same, mine = Hostile(seed), Hostile(1000 * seed + int(os.environ["RANK"]) + 1)
    left = CALLS_AFTER_THE_END
    for _ in range(CALLS):
        name = same.random.choice(list(surface))
        function, right = surface[name]
        alone = same.random.random() < 0.05
        hostile = mine if alone else same
        in_python = isinstance(getattr(function, "__func__", function), FunctionType)
        hostile.spares_torch = not in_python or function.__module__.startswith("torch")
        try:
            arguments = right() if same.random.random() < 0.1 else hostile.instead_in(right())
        except Exception as error:  # P2POp, for instance, rejects invalid arguments itself
            journal.note(f"no arguments: {error!r}"[:300])
            continue
        ready()
        made = attempt(name, function, arguments, journal)
        if isinstance(made, (torch_dist.Work, paceline.Work)):
            worry(made, hostile, journal)
        if is_over():
            left -= 1
            if left == 0:
                return


def plug_in(directory: str, seed: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    journal = Journal(f"{directory}/rank {os.environ['RANK']}")
    with torch_group("paceline", directory):
        group: Any = torch_dist.group.WORLD
        surface = functions(torch_dist) | methods(group) | operators(group)
        ready = partial(group.set_timeout, PATIENCE)
        ready()
        success = torch._C._distributed_c10d.ErrorType.SUCCESS
        make_calls(surface, seed, journal, lambda: group.get_error() != success, ready)
        for name in ("abort", "shutdown", "allreduce"):
            attempt(name, getattr(group, name), [[one()]] if name == "allreduce" else [], journal)


def natively(directory: str, seed: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    journal = Journal(f"{directory}/rank {os.environ['RANK']}")
    paceline.init_process_group()
    group = paceline.group.WORLD
    surface = functions(paceline)
    for name in (
        "all_reduce_init",
        "all_gather_init",
        "reduce_scatter_init",
        "broadcast_init",
        "reduce_init",
        "gather_init",
        "scatter_init",
        "send_init",
        "recv_init",
    ):
        init = getattr(paceline, name)
        _, right = surface[name.removesuffix("_init")]
        surface[name] = (
            lambda *arguments, init=init: init(*arguments)(),
            lambda right=right: [each for each in right() if each is not False],
        )

    def ready() -> None:
        group.set_timeout(PATIENCE)

    ready()
    make_calls(surface, seed, journal, lambda: group.failure() != 0, ready)
    paceline.destroy_process_group()
    attempt("all_reduce", group.all_reduce, [one()], journal)


@pytest.mark.timeout(3 * MOST_S)
@pytest.mark.parametrize("seed", range(examples(4)))
@pytest.mark.parametrize("face", [plug_in, natively])
def test_no_argument_ends_a_process(ranks, tmp_path, face, seed):
    try:
        ranks(2)(face, str(tmp_path), seed, timeout_s=MOST_S)
    except RankFailed as failure:
        last = "\n".join(f"{path.name}: {last_line(str(path))}" for path in sorted(tmp_path.glob("rank *")))
        pytest.fail(f"{failure}\nThe last calls:\n{last}")
