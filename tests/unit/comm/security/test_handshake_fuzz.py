"""Handshakes by strangers, and handshakes with modified bytes, are rejected with a defined error."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable

import pytest

from paceline import AuthenticationError
from paceline.comm.security.handshake import PeerHello, prove, verify
from paceline.comm.security.secret import derive_key

KEY = derive_key(b"0123456789abcdef", "links")
HELLO = PeerHello("links", 3, 9, 1)
_HELLO_BYTES, _ANSWER_BYTES, _PROOF_BYTES = 48, 48, 32
# The rank and the lane in a hello may have any value, because the proof covers them. All other fields are either
# compared or covered by the proof as well.


def _between(change: Callable[[int, bytes], bytes]) -> tuple[object, object]:
    """Returns both sides' results; `change(part, bytes)` replaces the hello (0), the answer (1) and the proof (2)."""
    client, client_side = socket.socketpair()
    server_side, server = socket.socketpair()
    results: list[object] = [None, None]

    def run(at: int, call: Callable[[], object], end: socket.socket) -> None:
        try:
            results[at] = call()
        except AuthenticationError as error:
            results[at] = error
        finally:
            end.close()

    def relay() -> None:
        try:
            for part, (source, target, nbytes) in enumerate(
                (
                    (client_side, server_side, _HELLO_BYTES),
                    (server_side, client_side, _ANSWER_BYTES),
                    (client_side, server_side, _PROOF_BYTES),
                )
            ):
                data = source.recv(nbytes, socket.MSG_WAITALL)
                if len(data) < nbytes:
                    return
                target.sendall(change(part, data))
        except OSError:
            pass
        finally:
            client_side.close()
            server_side.close()

    threads = [
        threading.Thread(target=run, args=(0, lambda: prove(client, KEY, HELLO, 2), client)),
        threading.Thread(target=run, args=(1, lambda: verify(server, KEY, "links", 9, 2), server)),
        threading.Thread(target=relay),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results[0], results[1]


def test_unchanged_they_agree() -> None:
    proved, seen = _between(lambda part, data: data)
    assert (proved, vars(seen)) == (None, vars(HELLO))


@pytest.mark.parametrize("part", [0, 1, 2], ids=["hello", "answer", "proof"])
def test_no_bit_can_be_changed(part: int) -> None:
    chance = random.Random(part)
    for _ in range(60):
        bit = chance.randrange(8 * (_PROOF_BYTES if part == 2 else _HELLO_BYTES))

        def flip(at: int, data: bytes, bit: int = bit) -> bytes:
            if at != part or bit // 8 >= len(data):
                return data
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            return bytes(changed)

        client, server = _between(flip)
        assert isinstance(server, AuthenticationError), bit
        assert part == 2 or isinstance(client, AuthenticationError), bit


@pytest.mark.parametrize("part", [0, 1, 2], ids=["hello", "answer", "proof"])
def test_nothing_can_be_left_out_or_made_up(part: int) -> None:
    chance = random.Random(10 + part)
    for _ in range(40):
        kind = chance.randrange(3)

        def mangle(at: int, data: bytes, kind: int = kind) -> bytes:
            if at != part:
                return data
            if kind == 0:  # a different one of the same length
                return chance.randbytes(len(data))
            if kind == 1:  # two pieces in the wrong order
                cut = chance.randrange(1, len(data)) if len(data) > 1 else 0
                return data[cut:] + data[:cut]
            return bytes(len(data))

        client, server = _between(mangle)
        assert isinstance(server, AuthenticationError)
        assert part == 2 or isinstance(client, AuthenticationError)


@pytest.mark.parametrize("side", ["verify", "prove"])
def test_garbage_of_any_length_is_refused(side: str) -> None:
    chance = random.Random(side)
    for length in [*range(0, 100, 7), 1000, 100_000]:
        ours, theirs = socket.socketpair()
        data = chance.randbytes(length)
        if chance.random() < 0.5:
            data = b"paceln/1links\0\0\0" + data
        theirs.setblocking(False)
        theirs.send(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(AuthenticationError):
            verify(ours, KEY, "links", 9, 2) if side == "verify" else prove(ours, KEY, HELLO, 2)
        ours.close()
        theirs.close()
