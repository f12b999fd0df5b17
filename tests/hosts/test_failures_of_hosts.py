"""What a rank sees when one on another host dies, vanishes, stops, stays away, leaves or calls something else."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

import paceline as dist
from hosts.network import ipv4, ipv6
from hosts.talking import await_word, rank, say


def told_by(call: Callable[[], object]) -> tuple[str, str, float]:
    """The error's type and message, and how long it took to come."""
    started = time.monotonic()
    try:
        call()
    except dist.CollectiveError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", time.monotonic() - started


def told_to(number: int, message: str) -> bool:
    """Whether the rank says that it saw it, or who did and told it."""
    me = rf"rank {number} \(h\d, pid \d+\)"
    return (
        re.search(rf", seen by ({me}|rank (?!{number} )\d \(h\d, pid \d+\), which told {me}) in ", message) is not None
    )


def world() -> dist.ProcessGroup:
    group = dist.GroupMember.WORLD
    assert group is not None
    return group


def wait_for(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


# Calls that do not fit

Call = Callable[[dist.ProcessGroup, bool], object]

MISMATCHES: dict[str, tuple[Call, Call]] = {
    "broadcast": (
        lambda group, later: dist.all_reduce(torch.ones(4), group=group, async_op=later),
        lambda group, later: dist.broadcast(torch.ones(4), 0, group=group, async_op=later),
    ),
    "400001 elements": (
        lambda group, later: dist.all_reduce(torch.ones(400_000), group=group, async_op=later),
        lambda group, later: dist.all_reduce(torch.ones(400_001), group=group, async_op=later),
    ),
    "float64": (
        lambda group, later: dist.all_reduce(torch.ones(4), group=group, async_op=later),
        lambda group, later: dist.all_reduce(torch.ones(4).double(), group=group, async_op=later),
    ),
    "MAX": (
        lambda group, later: dist.all_reduce(torch.ones(4), group=group, async_op=later),
        lambda group, later: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX, group=group, async_op=later),
    ),
    "root 1": (
        lambda group, later: dist.broadcast(torch.ones(4), 0, group=group, async_op=later),
        lambda group, later: dist.broadcast(torch.ones(4), 1, group=group, async_op=later),
    ),
    "all_to_all(float32, 600003 elements)": (
        lambda group, later: dist.all_reduce(torch.ones(4), group=group, async_op=later),
        lambda group, later: dist.all_to_all_single(
            torch.empty(600_003), torch.ones(600_003), _UNEQUAL, _UNEQUAL, group=group, async_op=later
        ),
    ),
}
_UNEQUAL = [150_000, 150_001, 150_001, 150_001]


def make_calls_that_do_not_match() -> list[tuple[str, str, float]]:
    dist.init_process_group(timeout=timedelta(seconds=15))
    told = []
    for usual, odd in MISMATCHES.values():
        for later in (False, True):
            group = dist.new_group()
            dist.barrier(group)

            mine = odd if rank() == 2 else usual

            def call(group: dist.ProcessGroup, make: Call = mine, later: bool = later) -> None:
                work = make(group, later)
                if later:
                    wait_for(work)
                # A rank whose part was over before the mismatch was seen is told with its next call.
                time.sleep(0.1)
                dist.barrier(group)

            told.append(told_by(lambda group=group, call=call: call(group)))
            assert told_by(lambda group=group: dist.barrier(group))[0] == "CollectiveMismatchError"  # broken for good
            dist.destroy_process_group(group)
    dist.barrier()  # other groups are not
    dist.destroy_process_group()
    return told


def test_calls_that_do_not_fit_are_named_on_every_rank(hosts):
    named = [what for what in MISMATCHES for _ in range(2)]
    for number, told in enumerate(hosts(2, 2)(make_calls_that_do_not_match)):
        for (error, message, took_s), what in zip(told, named, strict=True):
            assert error == "CollectiveMismatchError", message
            assert message.startswith(f"rank {number} (h{number // 2}, pid ")
            assert "rank 2 (h1, pid " in message and what in message, message
            assert message.count(" called ") == 2, message
            assert "All ranks of a group must make the same calls in the same order" in message
            assert took_s < 3


def split_wrongly() -> str:
    dist.init_process_group()
    rows = [2, 2, 2]
    with pytest.raises(dist.CollectiveMismatchError) as caught:
        # Rank 2 expects three rows of rank 1, which sends two.
        wanted = [2, 3, 2] if rank() == 2 else rows
        dist.all_to_all_single(torch.empty(sum(wanted)), torch.ones(6), wanted, rows)
        time.sleep(0.1)
        dist.barrier()
    return str(caught.value)


def test_splits_that_do_not_fit_name_both_ends(hosts):
    for number, message in enumerate(hosts(3, 1)(split_wrongly)):
        assert message.startswith(f"rank {number} (h{number}")
        assert "rank 1 (h1, pid " in message and "sends 8 bytes to rank 2 (h2, pid " in message
        assert "expects 12" in message


def send_what_is_not_expected() -> str:
    dist.init_process_group()
    message = ""
    if rank() == 0:
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            world().send(torch.ones(100_000), 1, async_op=False)
        message = str(caught.value)
    else:
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            world().recv(torch.empty(100_000, dtype=torch.int32), 0, async_op=False)
        message = str(caught.value)
    dist.barrier()  # the group remains usable
    return message


def test_a_message_that_does_not_fit_is_told_to_both_ends(hosts):
    for message in hosts(2, 1)(send_what_is_not_expected):
        assert "rank 0 (h0, pid " in message and "400000 bytes of float32" in message
        assert "rank 1 (h1, pid " in message and "400000 bytes of int32" in message


def take_different_algorithms(of_group: bool) -> str:
    name = ["ring", "tree"][rank()]
    if not of_group:
        with pytest.raises(dist.RendezvousError) as refused:
            dist.init_process_group(algorithm=name)
        return str(refused.value)
    dist.init_process_group()
    with pytest.raises(dist.CollectiveMismatchError) as caught:
        group = dist.new_group(algorithm=name)
        dist.all_reduce(torch.ones(3), group=group)
        dist.barrier(group)
    return str(caught.value)


@pytest.mark.parametrize("of_group", [False, True], ids=["of all groups", "of one group"])
def test_algorithms_that_differ_are_named(hosts, of_group):
    for message in hosts(2, 1)(take_different_algorithms, of_group):
        assert "ring" in message and "tree" in message, message
        assert "rank 0 (h0" in message or "rank 1 (h1" in message


# Ranks that do not come

CALLS: dict[str, Callable[[dist.ProcessGroup], object]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(100_000), group=group),
    "all_reduce, async": lambda group: wait_for(dist.all_reduce(torch.ones(100_000), group=group, async_op=True)),
    "barrier": lambda group: dist.barrier(group),
    "recv": lambda group: group.recv(torch.empty(3), 1, async_op=False),
    "recv, async": lambda group: group.recv(torch.empty(3), 1, async_op=True).wait(),
    "send": lambda group: group.send(torch.ones(100_000), 1, async_op=False),
}


def stay_away() -> list[tuple[str, str, float]]:
    dist.init_process_group(timeout=timedelta(seconds=20))
    told = []
    for of_one_call, call in [(False, call) for call in CALLS.values()] + [(True, None)]:
        group = dist.new_group(timeout=timedelta(seconds=60 if of_one_call else 0.5))
        for _ in range(5):  # too quick for anybody to tell the others what it waits in
            dist.all_reduce(torch.ones(3), group=group)
        if rank() == 1:
            time.sleep(0.8)
            told.append(told_by(lambda group=group: dist.all_reduce(torch.ones(3), group=group)))
        elif call is not None:
            told.append(told_by(lambda call=call, group=group: call(group)))
        else:
            limit = timedelta(seconds=0.5)
            told.append(told_by(lambda group=group, limit=limit: dist.barrier(group, timeout=limit)))
        dist.barrier()
        dist.destroy_process_group(group)
    return told


def test_a_rank_that_stays_away_is_named_with_its_latest_call(hosts):
    in_time, late = hosts(2, 1)(stay_away)
    for error, message, took_s in in_time:
        assert error == "CollectiveTimeoutError", message
        assert message.startswith("rank 0 (h0, pid ") and "timed out after 0.5 s" in message
        assert "rank 1 (h1, pid " in message and "latest all_reduce(float32, 3 elements, SUM) as call 6" in message
        assert 0.5 <= took_s < 0.8
    for error, message, _ in late:
        assert error == "CollectiveTimeoutError", message
        assert message.startswith("rank 1 (h1, pid ") and " on rank 0 (h0, pid " in message
        assert "which had waited for this rank in vain" in message and "did not come" not in message


def receive_from_each_other() -> tuple[str, str]:
    dist.init_process_group()
    limit = timedelta(seconds=0.3 if rank() == 0 else 20)
    told = told_by(lambda: world().recv(torch.empty(1), 1 - rank(), async_op=False, timeout=limit))
    return told[1], told_by(dist.barrier)[0]


def test_ranks_that_receive_from_each_other_are_told_the_truth(hosts):
    (first, then_first), (second, then_second) = hosts(2, 1)(receive_from_each_other)
    assert "rank 1 (h1, pid " in first and "did not come" in first
    assert "on rank 0 (h0, pid " in second and "waited for this rank in vain" in second
    assert "did not come" not in second
    for message in (first, second):
        assert "This group can no longer be used" in message
    assert then_first == then_second == "CollectiveTimeoutError"


def be_stopped() -> tuple[str, str, float] | None:
    dist.init_process_group(timeout=timedelta(seconds=2))
    dist.barrier()
    if rank() == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    return told_by(lambda: dist.all_reduce(torch.ones(500_000)))


def test_a_stopped_process_ends_in_a_time_out_that_names_it(hosts):
    with hosts(2, 2).start(be_stopped) as run:
        told = run.join(20, expect_dead={3})
    for error, message, took_s in told[:3]:
        assert error == "CollectiveTimeoutError" and took_s < 4
        assert f"rank 3 (h1, pid {run.pids[3]}) did not come" in message


# Ranks that are gone


def wait_for_the_dead(call: str) -> tuple[str, str, float]:
    dist.init_process_group()
    dist.barrier()
    if rank() == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    told = told_by(lambda: CALLS[call](world()))
    assert told_by(dist.barrier)[0] == "PeerLostError"
    return told


@pytest.mark.parametrize("call", ["all_reduce", "all_reduce, async", "recv, async", "send"])
def test_a_killed_rank_is_named_to_every_waiter_at_once(hosts, call):
    with hosts([1, 2]).start(wait_for_the_dead, call) as run:
        told = run.join(20, expect_dead={1})
    for number in (0, 2):
        error, message, took_s = told[number]
        assert error == "PeerLostError" and took_s < 1.3, (took_s, message)
        assert message.startswith(f"rank 1 (h1, pid {run.pids[1]}) died, seen by rank ")
        assert told_to(number, message), message
        assert "Look at its output" in message


def reduce_on(ready: str, timeout_s: float) -> tuple[str, str, float]:
    dist.init_process_group(timeout=timedelta(seconds=timeout_s))
    dist.barrier()
    say(ready, str(rank()))

    def call() -> None:
        while True:
            dist.all_reduce(torch.ones(100_000))

    return told_by(call)


def only_wait(ready: str, timeout_s: float) -> tuple[str, str, float]:
    dist.init_process_group(timeout=timedelta(seconds=timeout_s))
    dist.barrier()
    say(ready, str(rank()))
    return told_by(lambda: world().recv(torch.empty(3), 2 if rank() != 2 else 0, async_op=False))


@pytest.mark.parametrize("fn", [reduce_on, only_wait])
def test_a_host_that_vanishes_is_noticed(hosts, fn, tmp_path):
    with hosts(3, 1, bridged=True).start(fn, str(tmp_path), 60) as run:
        await_word(str(tmp_path), "0", "1", "2")
        time.sleep(0.3)
        run.cut_host(2)
        cut = time.monotonic()
        told = run.join(25)
    assert time.monotonic() - cut < 12.5
    for number, (error, message, _) in enumerate(told):
        assert error == "PeerLostError", message
        lost = "rank 2 (h2, pid " if number != 2 else "rank "
        assert message.startswith(lost) and "seen by" in message, message


def test_a_time_out_due_before_the_silence_limit_comes_first(hosts, tmp_path):
    with hosts(2, 1, bridged=True).start(reduce_on, str(tmp_path), 3) as run:
        await_word(str(tmp_path), "0", "1")
        time.sleep(0.3)
        run.cut_host(1)
        for number, (error, message, _) in enumerate(run.join(15)):
            assert error == "CollectiveTimeoutError"
            assert f"rank {1 - number} (h{1 - number}, pid {run.pids[1 - number]}) did not come" in message


def test_a_short_cut_is_survived(hosts, tmp_path):
    with hosts(2, 1, bridged=True).start(reduce_until, str(tmp_path)) as run:
        await_word(str(tmp_path), "0", "1")
        run.cut_host(1)
        time.sleep(1.5)
        run.heal()
        say(str(tmp_path), "healed")
        assert run.join(20) == [0, 0]


def reduce_until(ready: str) -> int:
    dist.init_process_group(timeout=timedelta(seconds=20))
    dist.barrier()
    say(ready, str(rank()))
    wrong = 0
    over = torch.zeros(1)
    while not over:
        tensor = torch.ones(50_000)
        dist.all_reduce(tensor)
        wrong += int(not (tensor == 2).all())
        over.fill_(float(os.path.exists(f"{ready}/healed") and rank() == 0))
        dist.broadcast(over, 0)
    return wrong


def leave_early() -> list[tuple[str, tuple[str, str, float]]]:
    dist.init_process_group(timeout=timedelta(seconds=20))
    told = []
    for name, call in CALLS.items():
        group = dist.new_group()
        dist.barrier(group)
        if rank() == 1:
            time.sleep(0.1)
            dist.destroy_process_group(group)  # and lives on
        else:
            told.append((name, told_by(lambda call=call, group=group: call(group))))
        dist.barrier()
    return told


@pytest.mark.parametrize("layout", [(3, 1), ([2, 1],)], ids=str)
def test_a_rank_that_left_is_told_from_one_that_died(hosts, layout):
    for number, told in enumerate(hosts(*layout)(leave_early)):
        for name, (error, message, took_s) in told:
            assert error == "PeerLostError", f"{name}: {message}"
            assert took_s < 1, f"{name}: {took_s}"
            assert message.startswith("rank 1 (h"), message
            assert " left the group (its script ended, or it destroyed the process group), seen by rank " in message
            assert told_to(number, message), message


def die_and_leave_a_child() -> tuple[str, str, float]:
    dist.init_process_group()
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    if rank() == 1:
        if os.fork() == 0:  # as the workers of a DataLoader are made
            time.sleep(60)
            os._exit(0)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return told_by(lambda: dist.all_reduce(torch.ones(100_000)))


def test_a_child_that_outlives_a_rank_does_not_hide_its_death(hosts):
    with hosts(3, 1).start(die_and_leave_a_child) as run:
        told = run.join(20, expect_dead={1})
    for error, message, took_s in (told[0], told[2]):
        assert error == "PeerLostError" and took_s < 1
        assert message.startswith(f"rank 1 (h1, pid {run.pids[1]}) died")


def die_together() -> tuple[str, str, float] | None:
    dist.init_process_group(timeout=timedelta(seconds=5))
    dist.barrier()
    if rank() in (1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    return told_by(lambda: dist.all_reduce(torch.ones(300_000)))


def test_more_than_one_death(hosts):
    with hosts(2, 2).start(die_together) as run:
        told = run.join(20, expect_dead={1, 3})
    for error, message, took_s in (told[0], told[2]):
        assert error == "PeerLostError" and took_s < 1.3
        assert message.startswith(("rank 1 (h0, pid ", "rank 3 (h1, pid "))


def interrupt_one_rank() -> str:
    dist.init_process_group()
    dist.barrier()
    if rank() == 1:
        time.sleep(0.6)
        return told_by(dist.barrier)[1]
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        world().recv(torch.empty(1), async_op=False)
    return told_by(dist.barrier)[1]


def test_an_interrupt_is_told_to_the_others(hosts):
    for number, message in enumerate(hosts(2, 1)(interrupt_one_rank)):
        assert message.startswith(f"rank {number} (h{number}, pid ") and "interrupted" in message
        assert "  " not in message
        assert number == 0 or "on rank 0 (h0, pid " in message, message


# Groups that do not form, and where they do


def meet_with_another_secret() -> str:
    if rank() == 1:
        os.environ["PACELINE_SECRET"] = "not the secret of this job, but as long"
    with pytest.raises((dist.AuthenticationError, dist.RendezvousError)) as caught:
        dist.init_process_group(timeout=timedelta(seconds=3))
    return str(caught.value)


def test_a_host_with_another_secret_is_told_so(hosts):
    here, there = hosts(2, 1)(meet_with_another_secret)
    assert "does not hold this job's secret" in there and "PACELINE_SECRET" in there
    assert "waited 3 s for 2 ranks; 0 arrived, 1 did not" in here


def use_two_groups() -> None:
    dist.init_process_group(timeout=timedelta(seconds=20))
    first, second = dist.new_group([0, 1, 2, 3]), dist.new_group([3, 1, 0])
    order = [first, second] if rank() % 2 == 0 else [second, first]
    works = []
    for size in (10, 300_000, 1):
        for group in order:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                tensor = torch.full((size,), 1.0)
                works.append((tensor, group, dist.all_reduce(tensor, group=group, async_op=True)))
    for tensor, group, work in works:
        wait_for(work)
        assert (tensor == group.size()).all()
    # A group that breaks leaves the others alone.
    if rank() in (0, 3):
        count = 5 if rank() == 0 else 6
        assert told_by(lambda: dist.all_reduce(torch.ones(count), group=second))[0] == "CollectiveMismatchError"
    elif rank() == 1:
        assert told_by(lambda: dist.all_reduce(torch.ones(5), group=second))[0] == "CollectiveMismatchError"
    tensor = torch.ones(1000)
    dist.all_reduce(tensor, group=first)
    assert (tensor == 4).all()
    dist.barrier()


def test_two_groups_at_once_and_one_that_breaks(hosts):
    hosts(2, 2)(use_two_groups)


def peers_addresses() -> set[str]:
    """The other ends of this process's TCP connections, but for the store's."""
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    ports = {str(connection.getsockname()[1]), str(connection.getpeername()[1])}
                    found |= {connection.getpeername()[0]} if os.environ["MASTER_PORT"] not in ports else set()
        except OSError:
            continue
    return found


def meet_on(interface: str | None, variable: bool, url: str | None) -> set[str]:
    if variable and interface:
        os.environ["PACELINE_IFACE"] = interface
    place = {"rank": rank(), "world_size": 2} if url else {}
    dist.init_process_group(
        init_method=url and url.format(port=os.environ["MASTER_PORT"]),
        interface=None if variable else interface,
        **place,
    )
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    assert (tensor == 2).all()
    addresses = peers_addresses()
    dist.barrier()
    return addresses


@pytest.mark.parametrize("variable", [False, True], ids=["argument", "variable"])
def test_the_interface_that_was_asked_for_is_used(hosts, variable):
    assert hosts(2, 1, networks=2)(meet_on, "eth1", variable, None) == [{ipv4(1, 1)}, {ipv4(0, 1)}]


def test_hosts_meet_over_ipv6(hosts):
    assert hosts(2, 1)(meet_on, None, True, f"tcp://[{ipv6(0)}]:{{port}}") == [{ipv6(1)}, {ipv6(0)}]
