"""Helpers around Linux system calls: the default action of Ctrl-C and its exceptions, and the fields of a process."""

from __future__ import annotations

import os
import signal

import pytest

from paceline.linux import die_on_interrupt, interrupts_raised, process_fields


@pytest.fixture
def handler():
    before = signal.getsignal(signal.SIGINT)
    yield lambda: signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_raises_in_the_block_of_a_process_it_kills(handler):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_on_interrupt()
    assert handler() is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt), interrupts_raised():
        signal.raise_signal(signal.SIGINT)
    assert handler() is signal.SIG_DFL


@pytest.mark.parametrize("chosen", [signal.SIG_IGN, lambda *_: None])
def test_the_handler_of_a_parent_or_a_program_is_kept(handler, chosen):
    signal.signal(signal.SIGINT, chosen)
    die_on_interrupt()
    with interrupts_raised():
        assert handler() is chosen
    assert handler() is chosen


def test_a_name_cut_within_a_character_is_skipped(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_bytes("7 (a) R (训练脚本".encode()[:-1] + b") S 1 7 7\n")
    assert process_fields(7, str(tmp_path)) == ["S", "1", "7", "7"]


def test_this_process_runs_below_its_parent():
    state, parent = process_fields("self")[:2]
    assert (state, int(parent)) == ("R", os.getppid())
