"""Messages exchanged with launchers over ssh, and their extraction from the launchers' output."""

from __future__ import annotations

import pytest

from paceline.operate.launch.ssh.protocol import (
    MARK,
    LauncherExited,
    LauncherReady,
    MessageSplitter,
    NodeAssignment,
    Signal,
    decode_to_launcher,
    encode_from_launcher,
    encode_to_launcher,
)

HELLO = LauncherReady("1.2", "/usr/bin/python3")


def part(number: int, nodes: int) -> NodeAssignment:
    return NodeAssignment(["train.py"], "/job", {}, "00" * 32, number, nodes, 2, "job7", 30.0)


def test_messages_are_found_however_they_are_cut():
    stream = (
        b"Welcome to node7\nlast login"
        + encode_from_launcher(HELLO)
        + b"[rank 0] loss 1.0\n"
        + encode_from_launcher(LauncherExited(3))
    )
    for size in (1, 2, 7, len(stream)):
        sieve, messages, printed = MessageSplitter(), [], b""
        for start in range(0, len(stream), size):
            said, rest = sieve.feed(stream[start : start + size])
            messages += said
            printed += rest
        assert messages == [HELLO, LauncherExited(3)]
        assert printed.split() == b"Welcome to node7 last login [rank 0] loss 1.0".split()


def test_what_only_begins_like_a_message_is_printed():
    sieve = MessageSplitter()
    assert sieve.feed(MARK[:5]) == ([], b"")
    assert sieve.feed(b"X\n") == ([], MARK[:5] + b"X\n")
    assert sieve.feed(b"see " + MARK + b"\n") == ([], b"see " + MARK + b"\n")
    assert sieve.feed(MARK[:5]) == ([], b"") and sieve.close() == MARK[:5]
    with pytest.raises(ValueError, match="not a message from a remote launcher"):
        sieve.feed(MARK + b"{}\n")


@pytest.mark.parametrize("message", [part(1, 2), Signal("SIGINT")])
def test_what_a_far_end_is_told_is_one_line(message):
    line = encode_to_launcher(message)
    assert line.count(b"\n") == 1 and decode_to_launcher(line) == message
    with pytest.raises(ValueError, match="not a message from a launching process"):
        decode_to_launcher(b"ls")
