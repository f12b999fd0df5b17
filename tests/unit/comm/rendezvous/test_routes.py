"""Names and addresses of hosts on their way to the resolver."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from paceline.routes import resolver_name, source_address

# A process that listens, finds its address and connects, by names and by addresses, as a rank does when it starts.
STARTS = """
import sys
from paceline.comm.one_port.dialer import dial, is_reachable_from_outside
from paceline.routes import source_address
from paceline.comm.store.tcp_store import listen_at_port

for host in ("localhost", "127.0.0.1"):
    with listen_at_port(host, 0, b"s" * 32) as listening:
        dial((host, listening.getsockname()[1]), 30.0, source_address(host)).close()
        assert not is_reachable_from_outside(host)
print("encodings.idna" in sys.modules)
"""


def test_ascii_names_need_no_codec():
    ran = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout == "False\n", ran.stderr


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_bytes_lead_where_text_does(host):
    assert socket.getaddrinfo(resolver_name(host), 80) == socket.getaddrinfo(host, 80)


def test_other_names_still_go_through_the_codec():
    assert resolver_name("b\u00fccher.example") == "b\u00fccher.example"


def test_a_source_address_is_found_by_name():
    assert source_address("localhost") in ("127.0.0.1", "::1")
