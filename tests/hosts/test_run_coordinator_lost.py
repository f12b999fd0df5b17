"""`paceline run --elastic` on several machines: the coordinating launcher is lost."""

from __future__ import annotations

import re

import pytest
from forked_scripts import run_alone
from launching import is_alive
from world import Ranks

from hosts.elastic_machines import TRAINS, machines
from hosts.network import ipv4
from hosts.resetting import reset_connections

__all__ = ["machines"]  # a fixture


def test_another_machine_coordinates_when_the_first_is_killed(machines):
    here = machines(3)
    launchers = [here.join(host, "3") for host in range(3)]
    here.wait(lambda: len(here.latest()) == 3)
    left = [uid for uid in here.workers() if here.host_of(uid) != "h0"]
    launchers[0].kill()
    here.wait_for_view(*left)
    # The death of a launcher with unread messages cannot be distinguished from a cut.
    told = "the previous coordinator, (has left|cannot be reached); machine . coordinates from now on"
    here.wait(lambda: any(re.search(told, here.said(launcher)) for launcher in launchers[1:]))
    here.say("end")
    for launcher in launchers[1:]:
        here.expect(launcher, 0)


@pytest.mark.parametrize("nnodes", ["1:2", "2:3"])
def test_the_first_launcher_joins_the_job_when_it_starts_again(machines, nnodes):
    hosts = int(nnodes[-1])
    here = machines(hosts)
    launchers = [here.join(host, nnodes) for host in range(hosts)]
    here.wait(lambda: len(here.latest()) == hosts)
    before = here.workers().keys()
    left = [uid for uid in before if here.host_of(uid) != "h0"]
    pids = [here.pid(uid) for uid in left]  # a worker that the new launcher starts too early may have the same name
    launchers[0].kill()
    launchers[0] = here.join(0, nnodes)
    here.wait(lambda: any(here.host_of(uid) == "h0" for uid in here.latest().keys() - before))
    (new,) = here.latest().keys() - before
    here.wait_for_view(*left, new)
    told = "the job is already running: the launcher at (.*):29400 coordinates it; this machine joins it"
    (coordinator,) = re.findall(told, here.said(launchers[0]))
    assert coordinator in [ipv4(host) for host in range(1, hosts)]
    assert all(map(is_alive, pids))
    here.say("end")
    for launcher in launchers:
        here.expect(launcher, 0)


def test_a_job_that_began_while_cut_off_gives_way(machines):
    here = machines(3, bridged=True)
    launchers = [here.join(host, "1:3") for host in range(3)]
    here.wait(lambda: len(here.latest()) == 3)
    (out,) = (uid for uid in here.workers() if here.host_of(uid) == "h0")
    left = [uid for uid in here.workers() if uid != out]
    here.network.cut_host(0)
    launchers[0].kill()
    here.wait_for_view(*left)
    launchers[0] = here.join(0, "1:3")
    here.expect_line(launchers[0], "slot 0 of 1 is on this machine")
    here.wait(lambda: here.host_of("0.0.0") == "h0" and here.latest().get("0.0.0") == ["0.0.0"])
    here.network.heal()
    here.expect_line(launchers[0], "this machine joins it")
    here.wait_for_view(*left, f"3.{out[2]}.0")
    assert "killed by" not in here.said(launchers[0])
    here.say("end")
    for launcher in launchers:
        here.expect(launcher, 0)


def test_a_machine_that_is_cut_off_for_a_while_comes_back(machines):
    here = machines(3, bridged=True)
    launchers = [here.join(host, "3") for host in range(3)]
    here.wait(lambda: len(here.latest()) == 3)
    left = [uid for uid in here.workers() if here.host_of(uid) != "h2"]
    (out,) = set(here.workers()) - {*left}
    here.network.cut_host(2)
    here.wait_for_view(*left)
    here.expect_line(launchers[2], "looking for another", 60)
    here.network.heal()
    here.wait_for_view(*left, out[:-1] + "1")
    here.say("end")
    for launcher in launchers:
        here.expect(launcher, 0)


def test_a_machine_may_ask_any_launcher_for_the_job(machines):
    here = machines(3)
    launchers = [here.join(host, "2:3") for host in range(2)]
    here.wait(lambda: len(here.latest()) == 2)
    launchers.append(here.join(2, "2:3", at=1))
    here.wait_for_view(*here.workers(), "2.2.0")
    here.say("end")
    for launcher in launchers:
        here.expect(launcher, 0)


def test_training_goes_on_with_the_same_bits(machines):
    here = machines(3)
    script = here.directory / "train.py"
    script.write_text(TRAINS)
    launchers = [here.join(host, "3", script=str(script)) for host in range(3)]
    steps = here.directory / "steps"
    here.wait(lambda: steps.exists() and len(steps.read_text().splitlines()) > 20)
    launchers[0].kill()
    for launcher in launchers[1:]:
        here.expect(launcher, 0)
    (alone,) = Ranks(1)(run_alone, str(script), str(here.directory))
    digests = {here.said(launcher, "out").split()[-1] for launcher in launchers[1:]}
    assert digests == {str(alone).split()[-1]}


def test_a_reset_connection_is_made_again(machines):
    here = machines(2)
    launchers = [here.join(host, "2") for host in range(2)]
    here.wait(lambda: len(here.latest()) == 2)
    before = here.latest()
    reset_connections(launchers[1].pid)
    here.wait(lambda: "is back" in here.said(launchers[0]))
    here.say("end")
    for launcher in launchers:
        here.expect(launcher, 0)
    assert here.latest() == before, "nobody was left out"
