"""Helpers for Linux system calls: the default action of Ctrl-C and its exceptions, and the fields of a process."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from paceline import linux
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


def test_a_shortage_of_descriptors_is_found_behind_other_errors():
    error = RuntimeError("cannot connect")
    error.__cause__ = OSError(errno.EMFILE, "too many")
    assert linux.is_out_of_descriptors(error)
    assert not linux.is_out_of_descriptors(OSError(errno.ENOENT, "none"))
    assert not linux.is_out_of_descriptors(None)
    text = str(linux.out_of_descriptors_error("rank 3", "its lanes"))
    assert text.startswith("rank 3: out of file descriptors") and "needed for its lanes" in text and "ulimit -n" in text


def test_descriptors_are_not_inherited_by_programs():
    opened = [linux.memfd_create("test"), linux.pidfd_open(os.getpid())]
    try:
        assert not any(os.get_inheritable(descriptor) for descriptor in opened)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_a_process_that_is_not_there_is_an_error_of_the_system():
    with pytest.raises(ProcessLookupError):
        linux.pidfd_open(2**22 + 1)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86_64")
@pytest.mark.parametrize(
    ("text", "waits"),
    [("0 0x0 0x7f", True), ("0 0x5 0x7f", False), ("23 0x1 0x7f", True), ("running", False), ("1 0x0", False)],
)
def test_a_process_that_reads_descriptor_0_waits_for_input(tmp_path, text, waits):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "syscall").write_text(text)
    assert linux.waits_for_stdin(7, str(tmp_path)) is waits
    assert not linux.waits_for_stdin(8, str(tmp_path))


def test_a_child_counts_until_it_has_been_waited_for():
    """Runs in a fork, because other tests leave child processes to this one."""
    if (fork := os.fork()) == 0:
        had_none, child = not linux.has_children(), os.fork()
        if child == 0:
            os._exit(0)
        had_one = linux.has_children()
        os.waitpid(child, 0)
        os._exit(0 if had_none and had_one and not linux.has_children() else 1)
    assert os.waitpid(fork, 0)[1] == 0
