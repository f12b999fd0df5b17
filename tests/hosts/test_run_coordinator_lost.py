"""`paceline run --elastic` on several machines, when the launcher that coordinates them is lost."""

from __future__ import annotations

from dataclasses import replace

from hosts.test_run_elastic_machines import machines

__all__ = ["machines"]


def test_another_machine_coordinates_when_the_first_is_killed(machines):
    here = machines(3)
    launchers = [here.join(host, "3") for host in range(3)]
    here.wait(lambda: len(here.latest()) == 3)
    left = [uid for uid in here.workers() if here.host_of(uid) != "h0"]
    launchers[0].kill()
    here.wait_for_view(*left)
    said = here.said(launchers[1]) + here.said(launchers[2])
    assert "which coordinated, is gone; machine" in said
    here.say("end")
    here.expect(launchers[1], 0)
    here.expect(launchers[2], 0)


def test_a_machine_that_is_cut_off_for_a_while_comes_back(machines):
    here = machines(3, bridged=True)
    launchers = [here.join(host, "3") for host in range(3)]
    here.wait(lambda: len(here.latest()) == 3)
    before = here.latest()
    conditions = here.network.bridge.conditions
    here.network.bridge.set(replace(conditions, cut=frozenset({(0, 2), (1, 2)})))
    here.wait(lambda: "looking for one" in here.said(launchers[2]))
    here.network.bridge.set(conditions)
    here.wait(lambda: "is back" in here.said(launchers[0]))
    here.say("end")
    for launcher in launchers:
        here.expect(launcher, 0)
    assert here.latest() == before, "nobody was left out"
