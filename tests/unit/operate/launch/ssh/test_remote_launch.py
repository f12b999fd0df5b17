"""`paceline run --hosts`: participating machines, messages and their timing, and reasons for missing machines."""

from __future__ import annotations

import pytest

from paceline.operate.launch.ssh.protocol import (
    LauncherExited,
    LauncherReady,
    NodeAssignment,
    RendezvousAddress,
    Signal,
)
from paceline.operate.launch.ssh.remote_launch import (
    Disconnect,
    LaunchAttempt,
    RemoteLaunch,
    SendMessage,
    ShowText,
    explain_failed_launch,
)

HELLO = LauncherReady("1.2", "/usr/bin/python3")


def part(number: int, nodes: int) -> NodeAssignment:
    return NodeAssignment(["train.py"], "/job", {}, "00" * 32, number, nodes, 2, "job7", 30.0)


def conduct(*names: str, is_elastic: bool = False) -> RemoteLaunch:
    parts = [part(number, len(names)) for number in range(len(names))]
    attempts = [LaunchAttempt(name, "/usr/bin/python3", "1.2") for name in names]
    return RemoteLaunch(parts, attempts, 60, 30, 0.0, is_elastic)


def started(*names: str, is_elastic: bool = False) -> RemoteLaunch:
    found = conduct(*names, is_elastic=is_elastic)
    for number in range(len(names)):
        found.receive(number, HELLO, 1.0)
    found.receive(0, RendezvousAddress("10.0.0.1", 29400), 1.0)
    found.take_actions()
    return found


def end(found: RemoteLaunch, machine: int, code: int, now_s: float) -> None:
    found.receive(machine, LauncherExited(code), now_s)
    found.ended(machine, code, "", now_s)


def sentences(found: RemoteLaunch) -> list[str]:
    return [action.text for action in found.take_actions() if isinstance(action, ShowText)]


def test_the_first_machine_says_where_all_meet():
    found = conduct("a", "b", "c")
    found.receive(1, HELLO, 1.0)
    assert found.take_actions() == []
    found.receive(0, HELLO, 2.0)
    assert found.take_actions() == [SendMessage(0, part(0, 3))]
    found.receive(0, RendezvousAddress("10.0.0.1", 29400), 3.0)
    [given] = found.take_actions()
    assert isinstance(given, SendMessage) and given.machine == 1 and given.message.rendezvous == ("10.0.0.1", 29400)
    found.receive(2, HELLO, 4.0)
    [given] = found.take_actions()
    assert isinstance(given, SendMessage) and given.machine == 2 and given.message.rendezvous == ("10.0.0.1", 29400)
    assert found.deadline_s is None


def test_a_good_run_ends_with_code_0():
    found = started("a", "b")
    end(found, 1, 0, 9.0)
    assert not found.is_over
    end(found, 0, 0, 9.5)
    assert (found.is_over, found.exit_code, found.take_actions(), found.deadline_s) == (True, 0, [], None)


def test_machines_that_refuse_are_all_named():
    found = conduct("a", "b", "c")
    found.receive(0, HELLO, 1.0)
    found.take_actions()
    found.ended(1, 255, "anna@b: Permission denied (publickey).\n", 2.0)
    found.ended(2, 255, "Host key verification failed.\n", 2.5)
    said = [action for action in found.take_actions() if isinstance(action, ShowText)]
    assert [each.text.split(":")[0] for each in said] == ["b", "c"]
    found.receive(0, RendezvousAddress("10.0.0.1", 1), 2.6)
    found.ended(0, 1, "", 4.0)
    assert (found.is_over, found.exit_code) == (True, 1)


def test_machines_are_asked_to_end_when_one_refused():
    found = conduct("a", "b", "c")
    found.receive(0, HELLO, 1.0)
    found.ended(1, 255, "Connection refused", 2.0)
    assert len(sentences(found)) == 1
    found.tick(found.deadline_s)
    assert found.take_actions() == [SendMessage(0, Signal("SIGTERM")), Disconnect(2)]
    found.ended(2, -9, "", 5.0)
    end(found, 0, 1, 6.0)
    assert (found.is_over, found.exit_code, found.take_actions()) == (True, 1, [])


def test_another_version_is_given_no_secret():
    found = conduct("a", "b")
    found.receive(1, LauncherReady("1.3", "/opt/python"), 1.0)
    found.receive(0, LauncherReady("1.2", "/opt/python"), 1.5)
    actions = found.take_actions()
    assert not any(isinstance(action, SendMessage) and isinstance(action.message, NodeAssignment) for action in actions)
    assert "b: /opt/python has paceline 1.3 there, and this machine has 1.2" in actions[0].text
    assert Disconnect(1) in [*actions, *_after_deadline(found)]


def _after_deadline(found: RemoteLaunch) -> list[object]:
    while (deadline_s := found.deadline_s) is not None and not found.is_over:
        found.tick(deadline_s)
        actions = found.take_actions()
        if actions:
            return list(actions)
    return []


def test_a_machine_that_does_not_answer_is_named():
    found = conduct("a", "b")
    found.receive(0, HELLO, 1.0)
    found.take_actions()
    assert found.deadline_s == 60.0
    found.tick(60.0)
    [said] = sentences(found)
    assert said.startswith("b: no launcher answered within 60 s")
    assert _after_deadline(found) == [SendMessage(0, Signal("SIGTERM")), Disconnect(1)]


def test_signals_are_passed_on_and_a_second_one_too():
    found = started("a", "b")
    found.signaled("SIGINT", 5.0)
    found.signaled("SIGINT", 6.0)
    assert found.take_actions() == [SendMessage(machine, Signal("SIGINT")) for machine in (0, 1, 0, 1)]
    end(found, 0, 1, 7.0)
    assert found.take_actions() == []
    found.tick(found.deadline_s)
    assert found.take_actions() == [Disconnect(1)]
    found.ended(1, -9, "", 60.0)
    assert (found.is_over, found.exit_code, found.take_actions()) == (True, 1, [])


def test_a_launcher_that_is_lost_is_named_and_the_others_end():
    found = started("a", "b")
    found.ended(1, 255, "Connection to b closed by remote host.", 9.0)
    [said] = sentences(found)
    assert said.startswith("b: its launcher was killed, or the ssh connection to it broke")
    found.tick(found.deadline_s)
    assert found.take_actions() == [SendMessage(0, Signal("SIGTERM"))]


def test_other_launchers_have_time_to_end_by_themselves():
    found = started("a", "b")
    end(found, 1, 3, 9.0)
    assert found.deadline_s > 9.0 + 30
    end(found, 0, 1, 10.0)
    assert (found.is_over, found.exit_code, found.take_actions()) == (True, 3, [])


def test_without_a_rendezvous_nobody_waits():
    found = conduct("a", "b")
    for number in range(2):
        found.receive(number, HELLO, 1.0)
    found.take_actions()
    end(found, 0, 2, 3.0)
    assert found.deadline_s == 3.0
    found.tick(3.0)
    assert found.take_actions() == [Disconnect(1)]
    found.ended(1, -9, "", 3.5)
    assert (found.is_over, found.exit_code) == (True, 2)


def test_an_elastic_job_goes_on_without_a_machine():
    found = started("a", "b", "c", is_elastic=True)
    found.ended(1, 255, "", 9.0)
    assert len(sentences(found)) == 1 and found.deadline_s is None
    end(found, 2, 0, 20.0)
    end(found, 0, 0, 20.0)
    assert (found.is_over, found.exit_code) == (True, 0)


@pytest.mark.parametrize(
    ("code", "errors", "said"),
    [
        (255, "No ED25519 host key is known for b\nHost key verification failed.", "compare it and accept it once"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", "ssh-keygen -R b"),
        (255, "anna@b: Permission denied (publickey,password).", "ssh-copy-id anna@b"),
        (255, "ssh: Could not resolve hostname b: Name or service not known", "its name cannot be resolved"),
        (255, "ssh: connect to host b port 22: Connection refused", "no ssh server listens there"),
        (255, "ssh: connect to host b port 22: No route to host", "it cannot be reached"),
        (255, "kex_exchange_identification: read: reset", "ssh failed (kex_exchange_identification: read: reset)"),
        (1, "/usr/bin/python3: No module named paceline", "has no paceline 1.2; install it: ssh anna@b"),
        (
            1,
            "Error while finding module specification (ModuleNotFoundError: No module named 'paceline')",
            "pip install",
        ),
        (127, "sh: 1: exec: /usr/bin/python3: not found", "/usr/bin/python3 does not exist there"),
        (1, "ImportError: libstdc++.so.6", "exited with code 1 before it answered: ImportError: libstdc++.so.6"),
    ],
)
def test_why_a_machine_did_not_come_says_what_to_do(code, errors, said):
    sentence = explain_failed_launch(LaunchAttempt("anna@b", "/usr/bin/python3", "1.2"), code, errors)
    assert sentence.startswith("anna@b: ") and said in sentence
