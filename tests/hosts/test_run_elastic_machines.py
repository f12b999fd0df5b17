"""`paceline run --elastic` on several machines, which join, leave and are lost without a restart."""

from __future__ import annotations

import os
import signal

import pytest
from launching import is_alive

from hosts.elastic_machines import TOY, TRAINS, machines
from hosts.network import ipv4

__all__ = ["machines"]  # a fixture


def test_a_machine_comes_and_goes_without_a_restart(machines):
    here = machines(3)
    first, second = here.join(0, "2:3"), here.join(1, "2:3", 2)
    here.wait(lambda: len(here.latest()) == 3)
    before = {uid: pid for uid, (pid, *_) in here.workers().items()}
    third = here.join(2, "2:3")
    here.wait_for_view(*before, "2.3.0")
    third.send_signal(signal.SIGTERM)
    here.expect(third, 0)
    here.wait_for_view(*before)
    assert {uid: pid for uid, (pid, *_) in here.workers().items() if uid in before} == before
    assert all(is_alive(int(pid)) for pid in before.values())
    assert len(here.workers()) == 4
    here.say("end")
    here.expect(first, 0)
    here.expect(second, 0)


def test_slots_count_through_the_machines(machines):
    here = machines(2)
    launchers = [here.join(0, "2", 1), here.join(1, "2", 2)]
    here.wait(lambda: len(here.latest()) == 3)
    assert sorted(slot for _, slot, _ in here.workers().values()) == ["0", "1", "2"]
    assert {slots for _, _, slots in here.workers().values()} == {"3"}
    here.say("end")
    for launcher in launchers:
        here.expect(launcher, 0)


def test_a_worker_of_another_machine_is_replaced_there(machines):
    here = machines(2)
    launchers = [here.join(host, "2") for host in range(2)]
    here.wait(lambda: len(here.latest()) == 2)
    victim = next(uid for uid in here.workers() if uid.startswith("1."))
    other = next(uid for uid in here.workers() if uid.startswith("0."))
    os.kill(here.pid(victim), signal.SIGKILL)
    here.wait_for_view(other, victim[:-1] + "1")
    assert is_alive(here.pid(other))
    here.say("end")
    for launcher in launchers:
        here.expect(launcher, 0)


def test_the_only_worker_with_the_state_survives_a_stop(machines):
    here = machines(2)
    serving = here.join(0, "1:2")
    here.wait(lambda: len(here.latest()) == 1)
    (holder,) = here.workers()
    os.kill(here.pid(holder), signal.SIGSTOP)
    told = f"waiting for {holder}: it is stopped, and no other worker holds the job's state; send it SIGCONT"
    here.expect_line(serving, told)
    other = here.join(1, "1:2")
    here.wait(lambda: len(here.workers()) == 2)
    assert is_alive(here.pid(holder))
    os.kill(here.pid(holder), signal.SIGCONT)
    here.wait_for_view(*here.workers())
    assert "was killed" not in here.said(serving)
    here.say("end")
    here.expect(serving, 0)
    here.expect(other, 0)


def test_a_stopped_worker_is_replaced_on_its_machine(machines):
    here = machines(2)
    launchers = [here.join(host, "2") for host in range(2)]
    here.wait(lambda: len(here.latest()) == 2)
    victim = next(uid for uid in here.workers() if uid.startswith("1."))
    other = next(uid for uid in here.workers() if uid.startswith("0."))
    pid = here.pid(victim)
    os.kill(pid, signal.SIGSTOP)
    here.wait_for_view(other, victim[:-1] + "1")
    assert not is_alive(pid) and is_alive(here.pid(other))
    here.say("end")
    for launcher in launchers:
        here.expect(launcher, 0)


def test_the_others_go_on_when_a_launcher_is_killed(machines):
    here = machines(2)
    # The other host has the majority of workers, because a launcher that dies with unread messages resets its
    # connection, and a reset does not prove a death.
    serving, other = here.join(0, "2", 3), here.join(1, "2", 1)
    here.wait(lambda: len(here.latest()) == 4)
    lost = [uid for uid, (_, slot, _) in here.workers().items() if here.host_of(uid) == "h1"]
    left = [uid for uid in here.workers() if uid not in lost]
    other.kill()
    here.wait_for_view(*left)
    here.wait(lambda: not any(is_alive(here.pid(uid)) for uid in lost))
    here.say("end")
    here.expect(serving, 0)


def test_all_machines_must_be_elastic_or_none(machines):
    here = machines(2)
    serving = here.join(0, "2")
    here.wait(lambda: "waiting for the others" in here.said(serving))
    plain = here.elastic(1, "2")
    here.expect(plain, 2)
    assert "was started without --elastic, but the launcher that hosts the rendezvous with" in here.said(plain)


def test_a_token_leads_to_an_elastic_job(machines):
    here = machines(2)
    words = ("--start-method=spawn", str(TOY), str(here.directory))
    serving = here.start(0, "--print-token", "--elastic", "--nnodes=2", "--master-addr", ipv4(0), *words, secret=None)
    here.wait(lambda: here.said(serving, "out").endswith("\n"))
    _, verb, dash, *rest, token = here.said(serving, "out").split()
    assert (verb, dash, rest) == ("join", "-", ["--elastic", str(TOY), str(here.directory)])
    other = here.start(1, "-", "--start-method=spawn", *rest, secret=None, verb="join", says=token)
    here.wait(lambda: len(here.latest()) == 2)
    here.say("end")
    here.expect(serving, 0)
    here.expect(other, 0)


def test_a_silent_machine_is_left_out(machines):
    here = machines(3, bridged=True)
    launchers = [here.join(host, "3", 1, "--rdzv-conf=return_timeout=4") for host in range(3)]
    here.wait(lambda: len(here.latest()) == 3)
    here.network.cut_host(2)
    here.wait(lambda: sum(len(members) == 2 for members in here.latest().values()) == 2)
    here.expect(launchers[2], 1)
    assert "no coordinator was found for 4 s" in here.said(launchers[2])
    here.say("end")
    here.expect(launchers[0], 0)
    here.expect(launchers[1], 0)


CALM = pytest.param((), marks=pytest.mark.soak, id="calm")


@pytest.mark.parametrize("flags", [CALM, pytest.param(("--chaos=cut:1s,seed=1",), id="cut")])
def test_workers_of_two_machines_train(machines, flags):
    here = machines(2)
    script = here.directory / "train.py"
    script.write_text(TRAINS)
    launchers = [here.join(host, "2", 1, *flags, script=str(script)) for host in range(2)]
    for launcher in launchers:
        here.expect(launcher, 0)
    said = "".join(here.said(launcher, "out") for launcher in launchers)
    digests = {line.split()[-1] for line in said.splitlines()}
    assert len(said.splitlines()) == 2 and len(digests) == 1
    cuts = sum(here.said(launcher).count("connections of slot") for launcher in launchers)
    assert bool(cuts) == bool(flags)
