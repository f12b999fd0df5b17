"""Files in directories writable by others: another user's files, planted links and named pipes are rejected."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from paceline import FileStore
from paceline.comm.rendezvous.shared_store import open_store_at_url
from paceline.comm.security.own_files import SharedFileError, own_directory, require_own_directory, write_own
from paceline.comm.security.secret import job_secret
from paceline.errors import RendezvousError, StoreError
from paceline.operate.launch.job import Command, Job
from paceline.operate.launch.job_directory import JobDirectory

pytestmark = pytest.mark.usefixtures("no_secret")

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")

SOMEBODY = 12345

JOB = Job(Command(("x.py",)), workers=1, run_id="job")


def foreign(path: Path, mode: int = 0o600) -> Path:
    """Creates a file that appears to belong to another user."""
    path.write_bytes(b"")
    path.chmod(mode)
    os.chown(path, SOMEBODY, -1)
    return path


@only_root
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_store_is_not_kept_in_a_file_of_another_user(tmp_path, mode):
    path = foreign(tmp_path / "meet", mode)
    with pytest.raises(StoreError, match=rf"{path} belongs to user {SOMEBODY} and has mode {mode:o} \(expected user 0"):
        FileStore(path, 2)
    assert path.read_bytes() == b""


@only_root
def test_ranks_do_not_meet_in_a_file_of_another_user(tmp_path):
    with pytest.raises(StoreError, match=rf"belongs to user {SOMEBODY}.*remove it, or choose a file in a directory"):
        open_store_at_url(f"file://{foreign(tmp_path / 'meet')}", 0, 1, timedelta(seconds=5))


@pytest.mark.parametrize(("mode", "content"), [(0o644, b"paceln/f"), (0o660, b""), (0o602, b"")])
def test_a_store_is_not_kept_in_a_file_open_to_others(tmp_path, mode, content):
    path = tmp_path / "meet"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(StoreError, match=rf"has mode {mode:o} \(expected user {os.geteuid()}, mode 600\)"):
        FileStore(path)


def test_an_empty_file_that_others_may_read_becomes_private(tmp_path):
    path = tmp_path / "meet"
    path.touch()
    path.chmod(0o644)
    store = FileStore(path)
    store.set("key", "value")
    store.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_store_follows_no_link(tmp_path):
    precious, link = tmp_path / "precious", tmp_path / "link"
    precious.write_text("precious")
    precious.chmod(0o600)
    link.symlink_to(precious)
    with pytest.raises(StoreError, match=rf"{link} is a symbolic link"):
        FileStore(link)
    os.link(precious, tmp_path / "name")
    with pytest.raises(StoreError, match=r"is one of 2 hard links to a file"):
        FileStore(tmp_path / "name")
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("content", ["precious", "x", "paceln/g and more"])
def test_a_file_that_is_no_store_keeps_its_content(tmp_path, content):
    path = tmp_path / "precious"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(StoreError, match="the file is not a store"):
        FileStore(path)
    assert path.read_text() == content


def test_a_store_in_a_named_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(StoreError, match="is not a regular file"):
        FileStore(tmp_path / "pipe")


def test_a_store_makes_its_file_for_this_user_alone(tmp_path):
    before = os.umask(0)
    try:
        FileStore(tmp_path / "meet").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "meet").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["meet"]


@only_root
def test_a_secret_of_another_user_is_not_taken(tmp_path, monkeypatch):
    path = foreign(tmp_path / "secret")
    monkeypatch.setenv("PACELINE_SECRET_FILE", str(path))
    with pytest.raises(ValueError, match=rf"belongs to user {SOMEBODY}, who knows the secret"):
        job_secret()


def test_a_secret_is_read_through_a_link_and_not_from_a_pipe(tmp_path, monkeypatch):
    (tmp_path / "data").write_text("0123456789abcdef\n")
    (tmp_path / "data").chmod(0o400)
    (tmp_path / "secret").symlink_to("data")  # as Kubernetes mounts secrets
    monkeypatch.setenv("PACELINE_SECRET_FILE", str(tmp_path / "secret"))
    assert job_secret() == b"0123456789abcdef"
    os.mkfifo(tmp_path / "pipe", 0o600)
    monkeypatch.setenv("PACELINE_SECRET_FILE", str(tmp_path / "pipe"))
    with pytest.raises(ValueError, match="is not a regular file"):
        job_secret()


@only_root
def test_a_directory_for_rendezvous_is_this_users(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    Path(own_directory()).rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"paceline-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RendezvousError, match="is not a directory that only user 0 can access"):
        own_directory()


def test_logs_do_not_go_where_a_link_leads(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / JOB.run_id).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SharedFileError, match=r"is not a directory; remove it"):
        JobDirectory(replace(JOB, output=replace(JOB.output, log_dir=str(tmp_path / "logs"))))
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_written_file_takes_the_place_of_a_readable_one(tmp_path):
    (tmp_path / "page.json").write_text("old")
    with (tmp_path / "page.json").open() as earlier:
        write_own(str(tmp_path / "page.json"), b"token")
        assert earlier.read() == "old"
    assert (tmp_path / "page.json").read_bytes() == b"token" and os.listdir(tmp_path) == ["page.json"]


def test_a_directory_of_this_user_is_accepted(tmp_path):
    require_own_directory(str(tmp_path))
