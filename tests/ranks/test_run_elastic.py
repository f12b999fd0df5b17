"""`paceline run --elastic` with workers that do not train: replacements, their timing, and the output."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_launcher import ForkedLauncher
from launching import ENVIRONMENT, command, is_alive, kill, processes_in, state_of, wait_until

TOY = str(Path(__file__).parents[1] / "support" / "elastic_toy.py")


class Elastic:
    """A job in its own directory; closing it stops all its processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.launcher: subprocess.Popen[bytes] | ForkedLauncher | None = None

    def start(self, workers: int, *flags: str, script: str = TOY, method: str = "spawn", **variables: str) -> None:
        words = ["--elastic", f"--nproc-per-node={workers}", f"--start-method={method}", *flags, script]
        words.append(str(self.directory))
        with open(self.directory / "err", "w") as err, open(self.directory / "out", "w") as out:
            self.launcher = subprocess.Popen(
                command(*words), stdout=out, stderr=err, env={**ENVIRONMENT, **variables}, cwd=self.directory
            )

    def start_forked(self, *words: str, **variables: str) -> None:
        """Starts a job with one worker and with a template process that has already imported torch."""
        self.launcher = ForkedLauncher(
            ["run", "--elastic", *words, str(self.directory)],
            {**ENVIRONMENT, **variables},
            self.directory / "out",
            self.directory / "err",
            cwd=str(self.directory),
        )

    def said(self, stream: str = "err") -> str:
        return (self.directory / stream).read_text()

    def log(self) -> dict[str, list[str]]:
        """Returns the process id, slot, number of slots and start time of each worker."""
        with contextlib.suppress(OSError):
            lines = [line.split() for line in (self.directory / "log").read_text().splitlines()]
            return {line[0]: line[1:] for line in lines if len(line) == 5}
        return {}

    def pid(self, uid: str) -> int:
        return int(self.log()[uid][0])

    def latest(self) -> dict[str, list[str]]:
        """Returns, for each worker, the members of the latest view that the worker has entered."""
        with contextlib.suppress(OSError):
            lines = [line.split() for line in (self.directory / "views").read_text().splitlines()]
            return {line[0]: line[1:] for line in lines}
        return {}

    def wait_for(self, *members: str) -> None:
        """Waits until these workers have entered a view with exactly these members."""
        self.wait(lambda: all(sorted(self.latest().get(uid, [])) == sorted(members) for uid in members))

    def wait_to_hear(self, text: str) -> None:
        self.wait(lambda: text in self.said())

    def wait(self, condition) -> None:
        try:
            wait_until(condition)
        except AssertionError:
            raise AssertionError(f"not in time; {self.log()}\n{self.latest()}\n{self.said()}") from None

    def order(self, word: str) -> None:
        (self.directory / word).touch()

    def expect(self, code: int) -> str:
        assert self.launcher is not None
        self.wait(lambda: self.launcher.poll() is not None)
        assert self.launcher.returncode == code, self.said()
        return self.said()

    def close(self) -> None:
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()
        kill(processes_in(self.directory))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Elastic]:
    made = Elastic(tmp_path)
    yield made
    made.close()


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


FIRST = ("0.0.0", "0.1.0", "0.2.0")


def test_a_killed_worker_is_replaced_and_the_others_live(job):
    job.start(3)
    job.wait_for(*FIRST)
    pids = {uid: job.pid(uid) for uid in FIRST}
    os.kill(pids["0.1.0"], signal.SIGKILL)
    job.wait_for("0.0.0", "0.1.1", "0.2.0")
    assert is_alive(pids["0.0.0"]) and is_alive(pids["0.2.0"])
    assert {(line[1], line[2]) for uid, line in job.log().items() if uid == "0.1.1"} == {("1", "3")}
    job.order("end")
    said = job.expect(0)
    assert f"slot 1 (worker 0.1.0, pid {pids['0.1.0']}) failed: killed by SIGKILL; another worker replaces it" in said
    assert len(job.log()) == 4, "nobody else was started"


def test_a_worker_that_fails_after_each_start_is_given_up(job):
    job.start(2)
    job.wait_for("0.0.0", "0.1.0")
    job.order("fail1")
    job.wait(lambda: "it is not replaced" in job.said() and job.said().rstrip().endswith("ValueError: told to fail"))
    said = job.said()  # the output ends with the latest traceback
    assert "(worker 0.1.0, pid " in said
    assert re.search(
        r"pid \d+\) failed: ValueError: told to fail \(elastic_toy.py:\d+\); another worker replaces it\n", said
    )
    assert "another worker replaces it in 0.25 s" in said
    assert "it is not replaced: 3 of its workers in a row failed within 60 s of joining" in said
    assert sorted(job.log()) == ["0.0.0", "0.1.0", "0.1.1", "0.1.2"]
    job.order("end")
    job.expect(0)


def test_when_all_slots_are_given_up_the_first_failure_is_told(job):
    job.order("break")
    job.start(2)
    said = job.expect(1)
    assert said.count("4 of its workers in a row failed before they joined") == 2
    assert "failed first (" in said
    assert "0 of at least 1 workers are ready, and no other will be started" in said
    assert len(job.log()) == 8


def test_a_script_without_an_elastic_loop_ends_well(job):
    script = job.directory / "plain.py"
    script.write_text("print('done')")
    job.start(2, script=str(script))
    job.expect(0)
    assert sorted(job.said("out").splitlines()) == ["[slot 0] done", "[slot 1] done"]


def test_a_worker_that_is_asked_to_leave_is_not_replaced(job):
    job.start(2)
    job.wait_for("0.0.0", "0.1.0")
    os.kill(job.pid("0.1.0"), signal.SIGTERM)
    job.wait_for("0.0.0")
    job.wait_to_hear("it was asked to leave, so it is not replaced")
    job.order("end")
    job.expect(0)
    assert len(job.log()) == 2


def test_a_stopped_worker_is_killed_and_replaced(job):
    job.start(2)
    job.wait_for("0.0.0", "0.1.0")
    os.kill(job.pid("0.1.0"), signal.SIGSTOP)
    job.wait_for("0.0.0", "0.1.1")
    assert "was stopped by a signal, so it was killed; another worker replaces it" in job.said()
    assert not is_alive(job.pid("0.1.0"))
    job.order("end")
    job.expect(0)


def test_the_only_worker_may_be_stopped(job):
    job.start(1)
    job.wait_for("0.0.0")
    os.kill(job.pid("0.0.0"), signal.SIGSTOP)
    wait_until(lambda: "it is stopped, and no other worker holds the job's state; send it SIGCONT" in job.said())
    os.kill(job.pid("0.0.0"), signal.SIGCONT)
    job.order("end")
    job.expect(0)
    assert len(job.log()) == 1


def test_a_short_stop_harms_nobody(job):
    job.start(2)
    job.wait_for("0.0.0", "0.1.0")
    pid = job.pid("0.1.0")
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid) == "T")
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(AssertionError):
        wait_until(lambda: not is_alive(pid), 2)
    job.order("end")
    assert "killed" not in job.expect(0)


def test_max_restarts_bounds_the_replacements(job):
    job.start(2, "--max-restarts=1")
    job.wait_for("0.0.0", "0.1.0")
    os.kill(job.pid("0.1.0"), signal.SIGKILL)
    job.wait_for("0.0.0", "0.1.1")
    os.kill(job.pid("0.1.1"), signal.SIGKILL)
    job.wait_to_hear("it is not replaced: --max-restarts 1 allows no further replacement on this machine")
    job.order("end")
    job.expect(0)
    assert len(job.log()) == 3


def test_a_signal_to_the_launcher_ends_all(job):
    job.start(2)
    job.wait_for("0.0.0", "0.1.0")
    pids = [job.pid("0.0.0"), job.pid("0.1.0")]
    job.launcher.terminate()
    said = job.expect(1)
    assert "SIGTERM: passed on to 2 workers" in said
    assert not any(map(is_alive, pids))
    assert len(job.log()) == 2, "nobody was replaced"


def test_no_worker_outlives_a_killed_launcher(job):
    job.start(2)
    job.wait_for("0.0.0", "0.1.0")
    pids = [job.pid("0.0.0"), job.pid("0.1.0")]
    job.launcher.kill()
    job.wait(lambda: not any(map(is_alive, pids)))


def test_a_worker_that_babbles_is_killed_and_replaced(job):
    job.start(2)
    job.wait_for("0.0.0", "0.1.0")
    job.order("babble1")
    job.wait_for("0.0.0", "0.1.1")
    assert "is killed because it sent b'hello', which is not a valid message" in job.said()
    job.order("end")
    job.expect(0)


PARENTS = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
open(os.path.join(sys.argv[1], "child-" + os.environ["PACELINE_WORKER"]), "w").write(str(child.pid))
sys.argv[0] = {TOY!r}
exec(compile(open({TOY!r}).read(), {TOY!r}, "exec"))
"""


def test_what_a_dead_worker_started_ends_and_nothing_else(job):
    script = job.directory / "parents.py"
    script.write_text(PARENTS)
    job.start(2, script=str(script))
    job.wait_for("0.0.0", "0.1.0")
    children = {uid: int((job.directory / f"child-{uid}").read_text()) for uid in ("0.0.0", "0.1.0")}
    os.kill(job.pid("0.1.0"), signal.SIGKILL)
    job.wait_for("0.0.0", "0.1.1")
    job.wait(lambda: not is_alive(children["0.1.0"]))
    assert is_alive(children["0.0.0"])
    job.order("end")
    job.expect(0)


def test_chaos_shows_each_act_and_what_it_cost(job):
    job.start(3, "--chaos=kill:0.5s,stop:3s,seed=7")
    job.wait_for(*FIRST)
    job.wait(lambda: job.said().count("chaos at ") >= 3 and job.said().count("replaces it") >= 3)
    job.order("end")
    said = job.expect(0)
    actions = said.count("chaos at ")
    assert f"chaos (kill:0.5s,stop:3s,seed=7): {actions} actions in " in said
    assert "workers replaced; until each participated: median " in said
    assert "the others resumed; after each loss: median " in said


FORKED = f"""
import gc, os, sys
import numpy, random
is_ready = {{"torch", "wave"}} <= {{*sys.modules}} and gc.isenabled()
facts = (is_ready, len(os.listdir("/proc/self/task")), numpy.random.rand(), random.random())
sys.stdout.write(" ".join(map(str, facts)) + "\\n")
exec(compile(open({TOY!r}).read(), {TOY!r}, "exec"))
"""


def test_workers_are_forks_with_torch_and_preload_that_differ(job):
    script = job.directory / "forked.py"
    script.write_text(FORKED)
    job.start(2, "--preload=wave,not_there", script=str(script), method="auto")
    job.wait_for("0.0.0", "0.1.0")
    assert "--preload not_there is ignored: ModuleNotFoundError: No module named 'not_there'" in job.said()
    for uid in ("0.0.0", "0.1.0"):
        assert command_of(job.pid(uid)).split("\0")[1] == str(script), "what ps shows"
    (template,) = (pid for pid in processes_in(job.directory) if "template.py" in command_of(pid))
    os.kill(template, signal.SIGKILL)
    os.kill(job.pid("0.1.0"), signal.SIGKILL)
    job.wait_for("0.0.0", "0.1.1")
    assert f"workers cannot be forked from process {template}: it has ended; starting another" in job.said()
    job.order("end")
    job.expect(0)
    facts = [line.split()[2:] for line in job.said("out").splitlines()]
    assert [each[:2] for each in facts] == [["True", "1"]] * 3
    assert len({each[2] for each in facts}) == len({each[3] for each in facts}) == 3


PRELOADED = f"""
import sys
sys.stdout.write(f"{{'calm' in sys.modules}} {{'busy' in sys.modules}}\\n")
exec(compile(open({TOY!r}).read(), {TOY!r}, "exec"))
"""
BUSY = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def test_modules_of_preload_that_do_harm_are_left_out(job):
    (job.directory / "busy.py").write_text(BUSY)
    (job.directory / "calm.py").touch()
    script = job.directory / "preloaded.py"
    script.write_text(PRELOADED)
    job.start_forked("--preload=calm,busy", str(script), PYTHONPATH=str(job.directory))
    job.wait_for("0.0.0")
    job.order("end")
    said = job.expect(0)
    assert job.said("out").split()[-2:] == ["False", "False"]
    assert "), so --preload calm,busy is ignored; starting another" in said
