"""The address at which a remote launcher is reached."""

from __future__ import annotations

from paceline.operate.launch.multinode.node_connection import own_address
from paceline.operate.launch.ssh.remote_launcher import address_toward


def test_a_machine_is_reached_as_ssh_reached_it():
    by_ssh = {"SSH_CONNECTION": "10.0.0.9 41000 10.0.0.7 22"}
    assert address_toward("127.0.0.1", by_ssh) == "10.0.0.7"
    assert address_toward("127.0.0.1", {"SSH_CONNECTION": "127.0.0.1 41000 127.0.0.1 22"}) == own_address()
    assert address_toward("127.0.0.1", {}) == own_address()
