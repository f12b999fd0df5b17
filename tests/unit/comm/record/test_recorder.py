"""The conditions under which a process records its calls, and the file into which it records them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from recorded_programs import CALLS, recorded, run

from paceline.comm.record import layout
from paceline.comm.record.recorder import MOST_FILES, HandedMemory
from paceline.operate.diagnosis.recording_reader import NoRecordingError, read_live


def test_a_forked_child_records_nothing_into_its_parents(tmp_path):
    code = """
import os, paceline
with paceline.span("parent"):
    child = os.fork()
    if child == 0:
        for _ in range(3):
            with paceline.span("child"): pass
        os._exit(0)
    os.waitpid(child, 0)
"""
    recording = recorded(code, tmp_path)
    assert [event.name for event in recording.events] == ["parent"]


def test_the_end_of_a_child_of_multiprocessing_is_recorded(tmp_path):
    code = """
import multiprocessing, paceline

def child():
    with paceline.span("child"): pass

paceline.span  # imports the recorder before the fork
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
"""
    recording = recorded(code, tmp_path)
    assert [event.name for event in recording.events] == ["child"]
    assert recording.is_ended


def test_nothing_is_recorded_if_the_user_says_so(tmp_path):
    done = run(f"{CALLS}\nprint(_core.is_recording())", tmp_path, PACELINE_RECORD="off")
    assert done.stdout == "False\n" and not list(tmp_path.iterdir())


def test_without_room_for_a_file_a_process_goes_on(tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))"
    done = run(f"{limit}\n{CALLS}\nprint(_core.is_recording())", tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert not list(tmp_path.iterdir()), "a file without its room would end the process with SIGBUS"


def test_a_directory_of_others_is_not_used(tmp_path):
    tmp_path.chmod(0o755)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    done = run(f"{CALLS}\nprint(_core.is_recording())", shared)
    assert done.stdout == "True\n" and not list(shared.iterdir())


def test_old_files_of_processes_that_have_ended_are_removed(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for number in range(MOST_FILES + 3):
        (tmp_path / f"{number:019}-{gone.pid}.record").touch()
    mine = tmp_path / f"{0:019}-{os.getpid()}.record"
    mine.touch()
    assert run(CALLS, tmp_path).returncode == 0
    assert mine.exists()
    assert len(list(tmp_path.iterdir())) <= MOST_FILES + 1


def test_memory_that_a_launcher_keeps_is_used(tmp_path):
    fd = os.memfd_create("test")
    try:
        os.truncate(fd, layout.NBYTES)
        handed = HandedMemory(fd, os.fstat(fd).st_ino, os.getpid())
        with pytest.raises(NoRecordingError):
            read_live(fd)
        assert run(CALLS, tmp_path, PACELINE_RECORD_FD=str(handed)).returncode == 0
        assert [call.sequence for call in read_live(fd).calls] == [1, 2, 3]
        assert not list(tmp_path.iterdir())
        # A process that starts after the first one has exited reuses the same recording.
        assert run(CALLS, tmp_path, PACELINE_RECORD_FD=str(handed)).returncode == 0
        assert [call.sequence for call in read_live(fd).calls] == [1, 2, 3]
        # If the descriptor now refers to a different file, the process does not write to that file.
        wrong = HandedMemory(fd, handed.inode + 1, os.getpid())
        assert run(CALLS, tmp_path, PACELINE_RECORD_FD=str(wrong)).returncode == 0
        assert len(list(tmp_path.iterdir())) == 1
    finally:
        os.close(fd)
