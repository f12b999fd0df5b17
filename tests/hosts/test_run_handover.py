"""`paceline run --elastic` on several machines: the coordinating launcher is asked to exit."""

from __future__ import annotations

import os
import signal

from hosts.elastic_machines import machines

__all__ = ["machines"]


def test_the_launcher_that_coordinates_hands_over(machines):
    here = machines(3)
    launchers = [here.join(host, "3") for host in range(3)]
    here.wait(lambda: len(here.latest()) == 3)
    before = {uid: pid for uid, (pid, *_) in here.workers().items()}
    left = [uid for uid in before if here.host_of(uid) != "h0"]
    launchers[0].send_signal(signal.SIGTERM)
    here.expect(launchers[0], 0)
    here.wait_for_view(*left)
    said = "".join(here.said(each) for each in launchers)
    assert "coordinates from now on" in here.said(launchers[0])
    assert "looking for another" not in said and "workers continue" not in said, "nobody was missed"
    victim, other = left
    os.kill(here.pid(victim), signal.SIGKILL)
    here.wait_for_view(other, victim[:-1] + "1")
    assert here.workers()[other][0] == before[other]
    here.say("end")
    for launcher in launchers[1:]:
        here.expect(launcher, 0)


def test_one_after_the_other_may_go(machines):
    here = machines(3)
    launchers = [here.join(host, "3") for host in range(3)]
    here.wait(lambda: len(here.latest()) == 3)
    for launcher in launchers[:2]:
        launcher.send_signal(signal.SIGTERM)
        here.expect(launcher, 0)
    (last,) = [uid for uid in here.workers() if here.host_of(uid) == "h2"]
    here.wait_for_view(last)
    here.say("end")
    here.expect(launchers[2], 0)


def test_failures_outlive_the_launcher_that_collected_them(machines):
    here = machines(4)
    launchers = [here.join(host, "4", 1, "--max-restarts=0") for host in range(4)]
    here.wait(lambda: len(here.latest()) == 4)
    slots = {here.host_of(uid): slot for uid, (_, slot, _) in here.workers().items()}
    here.say("fail" + slots["h1"])
    here.expect_line(launchers[1], "it is not replaced")
    launchers[0].kill()
    here.wait(lambda: any("coordinates from now on" in here.said(launcher) for launcher in launchers[1:]))
    for host in ("h2", "h3"):
        here.say("fail" + slots[host])
    for launcher in launchers[1:]:
        here.expect(launcher, 1)
        assert f"slot {slots['h1']} failed first (h1" in here.said(launcher)
        assert "ValueError: told to fail" in here.said(launcher).partition("failed first (h1")[2]


def test_a_machine_that_was_away_learns_that_the_job_is_over(machines):
    here = machines(3, bridged=True)
    launchers = [here.join(host, "3") for host in range(3)]
    here.wait(lambda: len(here.latest()) == 3)
    left = [uid for uid in here.workers() if here.host_of(uid) != "h2"]
    (out,) = set(here.workers()) - {*left}
    here.network.cut_host(2)
    here.wait_for_view(*left)
    here.expect_line(launchers[2], "looking for another")
    os.kill(here.pid(out), signal.SIGKILL)
    here.wait(lambda: out[:-1] + "1" in here.workers())
    here.say("end")
    for launcher in launchers[:2]:
        here.expect(launcher, 0)
    here.network.heal()
    here.expect(launchers[2], 1)
    assert "the job seems to have ended: none of its launchers can be reached (machine " in here.said(launchers[2])


def test_a_machine_that_the_launchers_do_not_reach_comes_back(machines):
    """The machine's workers can still send data. The other machines continue without them until a new worker joins."""
    here = machines(3, bridged=True)
    script = here.directory / "train.py"
    script.write_text(TRAINS_ON)
    launchers = [here.join(host, "3", script=str(script)) for host in range(3)]
    here.wait(lambda: len(here.notes("began")) == 3, 60)
    here.network.cut_host(2, port=29400)
    here.expect_line(launchers[0], "2 workers continue", 60)
    here.expect_line(launchers[2], "looking for another", 60)
    here.network.heal()
    here.wait(lambda: len(here.notes("began")) == 4, 60)
    assert not any(launcher.poll() for launcher in launchers)


TRAINS_ON = """
import os, sys, torch, paceline
paceline.init_process_group(elastic=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.ones(24, 4), torch.zeros(24, dtype=torch.long))
shards = paceline.LogicalShards(model, 4)
loader = paceline.ShardLoader(data, batch_size=2, shards=shards)
state = paceline.ElasticState(shards, loader=loader)
has_begun = False
def note(name):
    with open(sys.argv[1] + "/" + name, "a") as file:
        file.write(os.environ["PACELINE_WORKER"] + "\\n")
for epoch in state.epochs(1000000):
    for batches in loader:
        model.zero_grad()
        shards.backward(lambda xy: torch.nn.functional.cross_entropy(model(xy[0]), xy[1]), batches)
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
        if not has_begun and not state.is_replaying:
            has_begun = True
            note("began")
"""
