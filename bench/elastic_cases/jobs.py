"""Jobs that run alongside the benchmark, each in its own directory. Closing a job stops all its processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from elastic_cases import timeline

HERE = Path(__file__).resolve().parent
Popen = subprocess.Popen[bytes]
_ENDING_S = 10.0
_ALONE_S = 1.0
_OF_A_JOB = ("PACELINE_SECRET", "PACELINE_SECRET_FD", "PACELINE_SECRET_FILE", "PACELINE_STORE", "RANK", "WORLD_SIZE")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in _OF_A_JOB},
    "OMP_NUM_THREADS": "1",
}


class Job(Protocol):
    """A running job."""

    directory: Path

    def is_over(self) -> bool:
        """Returns True if the job has completed successfully; otherwise restarts processes where necessary.

        Raises:
            RuntimeError: The job has failed.
        """

    def output(self) -> str:
        """Returns the output so far."""

    def close(self) -> None:
        """Stops the processes that are still running; idempotent."""


def popen(words: Sequence[str], output: TextIO, environment: Mapping[str, str] = ENVIRONMENT) -> Popen:
    """Starts a process without standard input; its output is written to a file."""
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)


class Launched:
    """A job of one or more launchers, which manage the workers.

    Args:
        commands: The launchers' commands, in which `{directory}` is replaced by the job's directory.
        start: A function that starts a launcher, given its command and the path of its output.
    """

    def __init__(self, *commands: Sequence[str], start: Callable[[list[str], TextIO], Popen] = popen) -> None:
        self._made = tempfile.TemporaryDirectory(prefix="paceline-bench-")
        self.directory = Path(self._made.name)
        self._commands = commands
        self.launchers: list[Popen] = []
        for number, command in enumerate(commands):
            words = [word.replace("{directory}", str(self.directory)) for word in command]
            with open(self.directory / f"output-{number}", "w") as output:
                self.launchers.append(start(words, output))

    def is_over(self) -> bool:
        codes = [launcher.poll() for launcher in self.launchers]
        if failed := [number for number, code in enumerate(codes) if code]:
            output = (self.directory / f"output-{failed[0]}").read_text()
            command, code = self._commands[failed[0]], codes[failed[0]]
            raise RuntimeError(f"{command} ended with exit code {code}:\n{output[-3000:]}")
        return None not in codes

    def output(self) -> str:
        """Returns the output of the launchers and their workers."""
        return "".join(path.read_text() for path in sorted(self.directory.glob("output-*")))

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for launcher in self.launchers:
                if launcher.poll() is None:
                    launcher.send_signal(number)
            deadline = time.monotonic() + _ENDING_S
            for launcher in self.launchers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(max(0.0, deadline - time.monotonic()))
        for note in timeline.latest(self.directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(note.pid, signal.SIGKILL)
        self._made.cleanup()


class TorchFT:
    """Replica groups of one worker each, with a lighthouse. A dead worker is restarted, as a scheduler would do."""

    def __init__(self, python: str, workers: int, steps: int) -> None:
        self._made = tempfile.TemporaryDirectory(prefix="paceline-bench-")
        self.directory = Path(self._made.name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        of_its_readme = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        lighthouse = str(Path(python).parent / "torchft_lighthouse")
        self._environment = {**ENVIRONMENT, "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
        self._output = open(self.directory / "output-0", "w")  # noqa: SIM115 - `close` closes it
        self._lighthouse = self._popen(lighthouse, "--bind", f"[::]:{port}", *of_its_readme)
        script, options = str(HERE / "train_torchft.py"), ("--steps", str(steps), "--replicas", str(workers))
        self._words = [(python, script, str(self.directory), *options, "--replica", str(n)) for n in range(workers)]
        self._workers = [self._popen(*words) for words in self._words]

    def _popen(self, *words: str) -> Popen:
        return popen(words, self._output, self._environment)

    def is_over(self) -> bool:
        if any(worker.poll() == 0 for worker in self._workers):
            # A worker that has not rejoined by now would find no other workers and would train alone from the first
            # step.
            deadline = time.monotonic() + _ALONE_S
            with contextlib.suppress(subprocess.TimeoutExpired):
                for worker in self._workers:
                    worker.wait(max(0.0, deadline - time.monotonic()))
            return True
        for number, worker in enumerate(self._workers):
            if worker.poll():
                self._workers[number] = self._popen(*self._words[number])
        return False

    def output(self) -> str:
        """Returns the output of the lighthouse and the workers."""
        return (self.directory / "output-0").read_text()

    def close(self) -> None:
        for process in [*self._workers, self._lighthouse]:
            process.kill()
            process.wait()
        self._output.close()
        self._made.cleanup()


def elastic(workers: int, steps: int, *options: str, script: str = "train_shards.py") -> Launched:
    """Starts an elastic Paceline job that runs `train_shards.py` or another script."""
    launcher = (sys.executable, "-m", "paceline", "run", "--elastic", "--nproc-per-node", str(workers))
    return Launched([*launcher, str(HERE / script), "{directory}", "--steps", str(steps), *options])


def torchrun(workers: int, steps: int, restarts: int) -> Launched:
    """Starts a torchrun job that runs `train_ddp.py`."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers))
    script = (str(HERE / "train_ddp.py"), "{directory}", "--steps", str(steps))
    # The agent would otherwise keep its store open, and restarted workers would find the addresses of dead workers in
    # it.
    fresh_store = ("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    return Launched([*fresh_store, *launcher, "--max-restarts", str(restarts), *script])


def undisturbed_digest(steps: int, shards: int = 4) -> str:
    """Returns the digest of a run in one process without a launcher."""
    script = (str(HERE / "train_shards.py"), "{directory}", "--steps", str(steps), "--shards", str(shards))
    job = Launched([sys.executable, *script])
    with contextlib.closing(job):
        while not job.is_over():
            time.sleep(0.05)
        (result,) = results_of(job.directory)
        return str(result["digest"])


def results_of(directory: Path) -> list[dict[str, object]]:
    """Returns the results of the workers that completed their training loop."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("result-*")) if not path.suffix]
