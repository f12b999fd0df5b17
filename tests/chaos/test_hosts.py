"""Kills, stops and disconnects ranks on two hosts at random times; the others must detect the failure and clean up."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hosts.talking import await_word, rank, say
from launching import wait_until

import paceline as dist

TIMEOUT_S = 3
PATIENT_S = 60  # the timeout if no call is expected to time out
SILENCE_S = 9  # time until a vanished host is considered lost, regardless of the timeout
BUSY_S = 20  # upper bound on a busy machine
PAIR = [0, 3]
EVENTS = ("kill", "stop", "cut", "kill two", "kill and stop", "a short stop", "a short cut")


def event_of(seed: int) -> str:
    return EVENTS[seed % len(EVENTS)]


def is_short(event: str) -> bool:
    """Returns True if all ranks survive."""
    return event.startswith("a short")


def ours() -> set[str]:
    """Returns the threads and shared memory that belong to Paceline."""
    names = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just exited
            names.add((task / "comm").read_text().strip())
    maps = Path("/proc/self/maps").read_text()
    return {name for name in names if name.startswith("paceline")} | ({"memory"} if "memfd:paceline" in maps else set())


def one_step(world: dist.ProcessGroup, sub: dist.ProcessGroup | None, chance: random.Random) -> None:
    """Runs a random step; all ranks use the same seed, so they run the same calls."""
    size, me = world.size(), world.rank()
    count = chance.choice([1, 100, 5_000, 70_000, 300_000])
    later = chance.random() < 0.5
    tensor = torch.ones(count)
    works = [dist.all_reduce(tensor, async_op=later)]
    kind = chance.randrange(5)
    if kind == 0:
        peer = (me + size // 2) % size
        received = world.recv(torch.empty(count), peer, async_op=True)
        world.send(torch.ones(count), peer, async_op=False)
        works.append(received)
    elif kind == 1:
        outputs = [torch.empty(count) for _ in range(size)]
        dist.all_to_all(outputs, [torch.ones(count) for _ in range(size)])
    elif kind == 2 and sub is not None:
        works.append(dist.all_reduce(torch.ones(count), group=sub, async_op=True))
    elif kind == 3:
        dist.broadcast(torch.ones(count), chance.randrange(size))
    for work in works:
        if work is not None:
            work.wait()
    if not (tensor == size).all():
        raise AssertionError("a wrong sum")


def go_on_until_told(ready: str, seed: int) -> tuple[str, str, float]:
    dist.init_process_group()
    world = dist.GroupMember.WORLD
    pair = dist.new_group(PAIR)
    sub = pair if isinstance(pair, dist.ProcessGroup) else None
    for group in filter(None, (world, sub)):
        group.set_timeout(timedelta(seconds=PATIENT_S if is_short(event_of(seed)) else TIMEOUT_S))
    chance = random.Random(seed)
    say(ready, str(rank()))
    told = ("nothing", "", 0.0)
    # Rank 0 broadcasts whether the run is over, so that all ranks leave the loop after the same step.
    over = torch.zeros(1)
    try:
        while not over:
            one_step(world, sub, chance)
            over.fill_(float(Path(ready, "over").exists()))
            dist.broadcast(over, 0)
    except dist.CollectiveError as error:
        told = (type(error).__name__, str(error), time.time())
    started = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - started < SILENCE_S + BUSY_S
    wait_until(lambda: not ours())
    return told


def survive(hosts, directory: Path, seed: int) -> None:
    """Asserts that every unaffected rank raises an error, and that the error names an affected rank if there is one."""
    chance = random.Random(seed)
    event = event_of(seed)
    victims = chance.sample(range(4), 2)[: 2 if event in ("kill two", "kill and stop") else 1]
    with hosts(2, 2, bridged=True).start(go_on_until_told, str(directory), seed) as run:
        await_word(str(directory), *map(str, range(4)))
        time.sleep(chance.random() / 2)
        if event == "cut":
            run.cut(0, 1)
            victims = []
        elif event == "a short cut":
            run.cut(0, 1)
            time.sleep(0.7)
            run.heal()
        elif event == "a short stop":
            run.kill(victims[0], signal.SIGSTOP)
            time.sleep(0.7)
            run.kill(victims[0], signal.SIGCONT)
        else:
            for victim, way in zip(victims, ["stop" if event == "stop" else "kill", event.split()[-1]], strict=False):
                run.kill(victim, signal.SIGSTOP if way == "stop" else signal.SIGKILL)
        short = is_short(event)
        if short:
            say(str(directory), "over")
            victims = []
        happened = time.time()
        told = run.join(60, expect_dead=set(victims))
    for number in set(range(4)) - set(victims):
        error, message, at = told[number]
        place = f"seed {seed}, {event} {victims}, rank {number}: {error} {message}"
        if short:
            assert error == "nothing", place
            continue
        is_known = event in ("kill", "kill two")  # sent to all ranks, so none waits for the timeout
        assert error == "PeerLostError" or (error == "CollectiveTimeoutError" and not is_known), place
        assert at - happened < TIMEOUT_S + SILENCE_S + BUSY_S, place
        others = [f"rank {victim} (h{victim // 2}, pid {run.pids[victim]})" for victim in victims]
        # A rank of the subgroup may also report the other member, which left after it had detected a death in another
        # group.
        if number in PAIR and "left the group" in message and event != "stop":
            others += [f"rank {member} (h{member // 2}, pid {run.pids[member]})" for member in PAIR if member != number]
        assert not others or any(other in message for other in others), place


@pytest.mark.parametrize("seed", range(len(EVENTS)), ids=[each.replace(" ", "-") for each in EVENTS])
def test_survivors_are_told_and_clean_up(hosts, tmp_path, seed):
    survive(hosts, tmp_path, seed)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_survivors_are_told_and_clean_up_at_every_instant(hosts, tmp_path):
    first = int(os.environ.get("PACELINE_TEST_SEED", "100"))
    for seed in range(first, first + 140):
        directory = tmp_path / str(seed)
        directory.mkdir()
        survive(hosts, directory, seed)
