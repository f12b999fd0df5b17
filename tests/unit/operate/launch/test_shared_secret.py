"""The file through which launcher 0 of a Slurm step passes the secret to the other launchers."""

from __future__ import annotations

import io
import os
import pty
import termios
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import wait_until

from paceline.errors import RendezvousTimeoutError
from paceline.operate.launch.shared_secret import JoinToken, SlurmSecret, TokenError, read_token

DEADLINE_S = 20.0


def _step(directory: Path, **more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_START_TIME": "1700000000",
        "SLURM_SUBMIT_DIR": str(directory),
        **more,
    }


def _read(environment: dict[str, str], timeout_s: float = 0.0) -> bytes:
    return SlurmSecret(environment).await_from("node0", timeout_s, lambda _: None)


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob(".paceline-secret-*"))


def test_the_others_read_what_launcher_0_made(tmp_path):
    first = SlurmSecret(_step(tmp_path))
    secret = first.make()
    assert _read(_step(tmp_path)) == secret
    assert len(secret) == 32
    first.close()
    assert not _files(tmp_path)


def test_the_file_is_its_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        SlurmSecret(_step(tmp_path)).make()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in _files(tmp_path)] == [0o600]


def test_the_others_wait_for_launcher_0(tmp_path):
    made = []
    later = threading.Timer(0.2, lambda: made.append(SlurmSecret(_step(tmp_path)).make()))
    later.start()
    assert [_read(_step(tmp_path), DEADLINE_S)] == made


def test_home_serves_where_the_submit_directory_does_not(tmp_path):
    home, missing = tmp_path / "home", tmp_path / "missing"
    home.mkdir()
    secret = SlurmSecret(_step(missing, HOME=str(home))).make()
    assert _read(_step(tmp_path / "local", HOME=str(home))) == secret


@pytest.mark.parametrize(
    "more",
    [
        {"SLURM_RESTART_COUNT": "1"},
        {"SLURM_JOB_START_TIME": "1700000999"},
        {"SLURM_STEP_ID": "1"},
        {"SLURM_CLUSTER_NAME": "other"},
    ],
    ids=["requeued", "number used again", "next step", "another cluster"],
)
def test_a_file_of_another_run_is_not_read(tmp_path, more):
    SlurmSecret(_step(tmp_path)).make()  # a launcher that was killed before it could remove the file
    with pytest.raises(RendezvousTimeoutError):
        _read(_step(tmp_path, **more))


def test_a_stale_file_of_the_same_name_is_replaced(tmp_path):
    stale = SlurmSecret(_step(tmp_path)).make()
    fresh = SlurmSecret(_step(tmp_path)).make()
    assert _read(_step(tmp_path)) == fresh != stale
    assert len(_files(tmp_path)) == 1


def test_without_launcher_0_the_error_names_the_place(tmp_path):
    with pytest.raises(RendezvousTimeoutError, match=f"on node0, stored no secret .* in {tmp_path}.*PACELINE_SECRET"):
        _read(_step(tmp_path))


def test_a_file_that_others_can_read_is_refused(tmp_path):
    SlurmSecret(_step(tmp_path)).make()
    _files(tmp_path)[0].chmod(0o640)
    with pytest.raises(ValueError, match="not restricted to this user .*mode 640; expected .*mode 600"):
        _read(_step(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(tmp_path):
    SlurmSecret(_step(tmp_path)).make()
    os.chown(_files(tmp_path)[0], 12345, -1)
    with pytest.raises(ValueError, match="owner 12345"):
        _read(_step(tmp_path))


def test_a_link_is_not_followed(tmp_path):
    SlurmSecret(_step(tmp_path)).make()
    path = _files(tmp_path)[0]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="not a regular file"):
        _read(_step(tmp_path))


def test_no_place_to_leave_it_is_explained(tmp_path):
    with pytest.raises(OSError, match=r"cannot be stored .*missing \(No such file.*PACELINE_SECRET"):
        SlurmSecret(_step(tmp_path / "missing")).make()


@given(st.text(min_size=1, max_size=60).filter(lambda text: len(text.encode()) < 256), st.integers(0, 65535))
def test_a_token_brings_back_address_and_secret(host, port):
    assert JoinToken.decode(f" {JoinToken(host, port, b's' * 32).encode()}\n") == JoinToken(host, port, b"s" * 32)


@pytest.mark.parametrize("host", ["10.0.0.1", "fe80::1%eth0", "h0.example", "h_0"])
def test_a_printed_token_has_an_address_and_a_secret(host):
    printed = JoinToken(host, 29400, b"s" * 16)
    assert printed.require_printed() == printed
    for wrong in (replace(printed, secret=b"s" * 15), replace(printed, secret=b""), replace(printed, port=0)):
        with pytest.raises(TokenError, match="has no valid address or no secret"):
            wrong.require_printed()
    for name in ("", "\x1b[2J", "h0\nx", "h 0"):
        with pytest.raises(TokenError, match="has no valid address or no secret"):
            replace(printed, host=name).require_printed()


def test_a_token_is_asked_for_at_a_terminal_and_not_shown(monkeypatch, capsys):
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as terminal, os.fdopen(theirs) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(read_token)
            wait_until(lambda: not termios.tcgetattr(stdin)[3] & termios.ECHO)
            terminal.write(b"pl1-token\n")
            assert asked.result(60) == "pl1-token\n"
        assert termios.tcgetattr(stdin)[3] & termios.ECHO
        os.set_blocking(terminal.fileno(), False)
        assert b"pl1" not in (terminal.read(4096) or b"")
    assert capsys.readouterr().err.startswith("join token: ")


def test_a_token_comes_from_a_pipe(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("pl1-token\nfor the workers\n"))
    assert read_token() == "pl1-token\n"


def test_a_damaged_token_is_refused_and_the_secret_is_not_shown():
    token = JoinToken("10.0.0.1", 29400, b"very secret bytes of this job!!!")
    word = token.encode()
    for wrong in (word[:-1], word[:-4] + "aaaa", word.replace("pl1-", ""), "pl1-", "pl1-!!", "hello"):
        with pytest.raises(TokenError):
            JoinToken.decode(wrong)
    assert "secret bytes" not in repr(token)
