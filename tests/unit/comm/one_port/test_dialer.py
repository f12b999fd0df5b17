"""Logic of the one-port protocol without I/O (headers, numbers, connection directions), and host names."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline.comm.engine.native.connections import ReverseConnectRequests
from paceline.comm.one_port.dialer import (
    HEADER_BYTES,
    has_no_header,
    header_for,
    is_wrong,
    number_in,
    resolver_name,
    source_address,
)
from paceline.comm.one_port.port_multiplexer import FIRST, LAST, NumberTable
from paceline.comm.security.handshake import HELLO_BYTES
from paceline.comm.store.store import HashStore

# Headers


@given(st.integers(0, 2**32 - 1))
def test_a_header_holds_its_number(number):
    header = header_for(number)
    assert len(header) == HEADER_BYTES and number_in(header) == number
    assert not any(is_wrong(header[:length]) for length in range(HEADER_BYTES + 1))


@given(st.binary(max_size=80))
@settings(max_examples=examples(300))
def test_only_the_first_bytes_of_a_header_may_become_one(beginning):
    assert is_wrong(beginning) is not header_for(0).startswith(beginning[:8])


def test_a_header_is_longer_than_a_hello():
    assert HEADER_BYTES > HELLO_BYTES  # so a listener without a gate rejects it without waiting for more
    assert not has_no_header(header_for(7))


# Numbers


@given(st.data())
@settings(max_examples=examples(100))
def test_numbers_have_one_holder_each(data):
    numbers: NumberTable[int] = NumberTable()
    held: dict[int, int] = {}  # by number
    for holder in range(data.draw(st.integers(0, 40))):
        wanted = data.draw(st.sampled_from([0, 0, FIRST, FIRST + 1, 29500]))
        if wanted and wanted in held:
            with pytest.raises(OSError, match=f"has the number {wanted}"):
                numbers.take(wanted, holder)
        else:
            number = numbers.take(wanted, holder)
            assert number not in held and (number == wanted or FIRST <= number <= LAST)
            held[number] = holder
        if held and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(set(held.values()))))
            numbers.release(gone)
            held = {number: each for number, each in held.items() if each != gone}
    assert {number: numbers.holder(number) for number in held} == held


def test_a_number_returns_as_late_as_possible():
    numbers: NumberTable[str] = NumberTable()
    given_ = []
    for _ in range(FIRST, LAST + 1):
        given_.append(numbers.take(0, "holder"))
        numbers.release("holder")
    assert given_ == list(range(FIRST, LAST + 1))
    assert numbers.take(0, "holder") == FIRST


def test_all_numbers_can_be_held():
    numbers: NumberTable[int] = NumberTable()
    for holder in range(FIRST, LAST + 1):
        numbers.take(0, holder)
    with pytest.raises(OSError, match="all numbers from 1024 to 28999 are in use"):
        numbers.take(0, 0)
    numbers.release(FIRST + 7)
    assert numbers.take(0, 0) == FIRST + 7


# Calls


def test_a_rank_hears_who_cannot_connect_to_it():
    store = HashStore()
    ranks = [ReverseConnectRequests(store, 3, rank) for rank in range(4)]
    assert ranks[1].requesters([2, 3]) == {}
    ranks[3].request(1, "timed out")
    ranks[3].request(0, "refused")
    assert ranks[1].requesters([2, 3]) == {3: "timed out"} and ranks[1].requesters([2]) == {}
    assert ranks[0].requesters([1, 2, 3]) == {3: "refused"} and ranks[2].requesters([3]) == {}
    assert ReverseConnectRequests(store, 4, 1).requesters([2, 3]) == {}  # requests from another group are ignored


# A process that listens, looks up its address, and connects by name and by address, as a rank does at startup.
STARTS = """
import sys
from paceline.comm.one_port.dialer import dial, is_reachable_from_outside, source_address
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
