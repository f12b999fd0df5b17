"""The machines of `--hosts`, and the variables that are forwarded to the machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.operate.launch.option_types import OptionError
from paceline.operate.launch.ssh.remote_launch import (
    LaunchAttempt,
    explain_failed_launch,
    no_answer,
    other_version,
)
from paceline.operate.launch.ssh.ssh_launcher import Host, forwarded_variables, hosts_of, is_here


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a:4,b:2", [Host("a", None, 4), Host("b", None, 2)]),
        ("anna@node-1.cluster,10.0.0.7:8", [Host("node-1.cluster", "anna"), Host("10.0.0.7", None, 8)]),
        ("[fd00::1]:4,[fd00::2]", [Host("fd00::1", None, 4), Host("fd00::2")]),
        ("a:2,b,a:2", [Host("a", None, 4), Host("b")]),
        ("a,a,b", [Host("a", None, 2), Host("b")]),
    ],
)
def test_a_list_names_the_machines(text, meant):
    assert list(hosts_of(text)) == meant


@pytest.mark.parametrize(
    "lines",
    [
        "node1 slots=4\nnode2 slots=2\n",  # Open MPI, DeepSpeed, Horovod
        "# the cluster\nnode1 slots = 4 max_slots=8   # the large one\n\nnode2 slots=2",
        "node1:4\nnode2:2 ifname=eth0\n",  # MPICH
        "node1\nnode1\nnode2\nnode1\nnode1\nnode2\n",  # PBS_NODEFILE
        "node1 cpu=4\nnode2 count=2\n",
    ],
)
def test_a_host_file_is_read_as_mpi_reads_it(tmp_path, lines):
    file = tmp_path / "hosts"
    file.write_text(lines)
    assert list(hosts_of(str(file))) == [Host("node1", None, 4), Host("node2", None, 2)]


def test_a_host_file_may_name_users(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("node1 user=anna slots=2\nbert@node2")
    assert [host.destination for host in hosts_of(str(file))] == ["anna@node1", "bert@node2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lists no machine"),
        ("a:0", "has no workers"),
        ("a:many", "neither HOST nor HOST:N"),
        ("-oProxyCommand=x", "neither HOST nor HOST:N"),
        ("a b", "neither HOST nor HOST:N"),
        ("fd00::1", "in brackets"),
        ("./nowhere/hosts", "the file does not exist"),
    ],
)
def test_what_names_no_machines_is_refused(text, said):
    with pytest.raises(OptionError, match=said):
        hosts_of(text)


@pytest.mark.parametrize(
    ("lines", "said"),
    [("", "lists no machine"), ("a\nb gpus=2", ":2: 'gpus=2' is not known"), ("a slots=none", ":1: 'slots=none'")],
)
def test_a_wrong_line_of_a_host_file_has_a_number(tmp_path, lines, said):
    file = tmp_path / "hosts"
    file.write_text(lines)
    with pytest.raises(OptionError, match=said):
        hosts_of(str(file))


def test_on_this_machine_no_ssh_is_advised():
    attempt = LaunchAttempt("localhost", "/usr/bin/python3", "1.2", is_here=True)
    assert "ssh" not in explain_failed_launch(attempt, 1, "No module named paceline") + other_version(attempt, "1.3")
    assert "ssh" not in explain_failed_launch(attempt, 1, "ImportError") + no_answer(attempt, 60)


def test_settings_are_taken_along_and_secrets_are_not():
    environment = {
        "PACELINE_SECRET": "s" * 32, "PACELINE_SECURITY": "encrypt", "PET_MAX_RESTARTS": "3", "HOME": "/home/anna",
        "PACELINE_JOB": "7", "OMP_NUM_THREADS": "2", "WANDB_MODE": "offline",
    }  # fmt: skip
    taken = forwarded_variables(environment, {"WANDB_MODE": None, "LR": "0.1"})
    assert taken == {
        "PACELINE_SECURITY": "encrypt", "PET_MAX_RESTARTS": "3", "OMP_NUM_THREADS": "2", "WANDB_MODE": "offline",
        "LR": "0.1",
    }  # fmt: skip
    with pytest.raises(OptionError, match="--export NAME: this variable is not set here"):
        forwarded_variables({}, {"NAME": None})


def test_a_bare_name_may_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cluster").write_text("a slots=3")
    monkeypatch.chdir(tmp_path)
    assert list(hosts_of("cluster")) == [Host("a", None, 3)]
    assert list(hosts_of("other")) == [Host("other")]


@pytest.mark.parametrize(
    ("host", "here"),
    [
        (Host("localhost"), True),
        (Host("127.0.0.1"), True),
        (Host("127.0.0.1", "anna"), False),
        (Host("192.0.2.7"), False),  # an address reserved for documentation, which no machine has
    ],
)
def test_this_machine_is_known_by_its_addresses(host, here):
    assert is_here(host) == here
