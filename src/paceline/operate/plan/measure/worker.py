"""Worker program of `paceline plan --measure`: measures the links, then runs the script on each rank separately.

    python -m paceline.operate.plan.measure.worker SETTINGS SCRIPT ARGS...

SETTINGS is a `MeasureSettings` as JSON. The process exits after the last measured step and skips the script's final
actions, such as saving a model. Ranks that run at the same time each form a world of size 1, so they synchronize
through files.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

import paceline
from paceline.comm.rendezvous.environment import STORE, TORCH_STORE, TORCH_STORE_REQUESTS, USES_TORCH_STORE
from paceline.operate.plan.calibration import Links, encode
from paceline.operate.plan.measure.links import UNMEASURED_WITHIN, hosts_of, measure_links
from paceline.operate.plan.measure.step_watch import (
    LEFT_OUT,
    StepWatch,
    TooFewStepsError,
    calibration_of,
    reduction_s_per_byte,
    world_of_one,
)

_PAUSE_S = 0.01
_LATEST_S = 300.0  # timeout for the other ranks on this machine to finish their first step
_MOST_EXTRA_STEPS = 10  # limit on the steps of a rank that waits for slower ranks, as a multiple of the measured steps


class FileBarrier:
    """Signals between the ranks on a machine, implemented as files in a shared directory.

    Args:
        directory: an existing directory that these ranks share.
        rank: this rank's number on the machine.
        ranks: the number of ranks on the machine.
    """

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self._directory = directory
        self._rank = rank
        self.ranks = ranks

    def signal(self, word: str) -> None:
        """Sends a signal to the other ranks."""
        (self._directory / f"{word}.{self._rank}").touch()

    def all_signalled(self, word: str) -> bool:
        """Returns whether all ranks have sent the signal."""
        return all((self._directory / f"{word}.{rank}").exists() for rank in range(self.ranks))

    def signal_and_wait(self, word: str, timeout_s: float) -> bool:
        """Sends a signal and waits until all ranks have sent it; returns False on timeout."""
        self.signal(word)
        deadline = time.monotonic() + timeout_s
        while not self.all_signalled(word):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        return True


@dataclass(frozen=True)
class MeasureSettings:
    """The settings that the command passes to its workers.

    Attributes:
        output: the file that rank 0 writes.
        directory: an empty directory on this machine, shared by the ranks that run at the same time.
        steps: the number of measured steps.
        together: whether all ranks on the first machine run the script, each in a separate world; if false, only rank 0
            does.
        links: the known link properties, or None to measure them.
    """

    output: str
    directory: str
    steps: int
    together: bool
    links: Links | None = None


def main(words: Sequence[str]) -> None:
    """Runs the measurement with the given command-line arguments."""
    settings = msgspec.json.decode(words[0], type=MeasureSettings)
    script, arguments = words[1], list(words[2:])
    links, hosts = _links(settings)
    rank, here = int(os.environ.get("RANK", "0")), hosts[0]
    if rank not in here or (rank != 0 and not settings.together):
        return
    together = len(here) if settings.together else 1
    for name in (STORE, TORCH_STORE, TORCH_STORE_REQUESTS, USES_TORCH_STORE):
        os.environ.pop(name, None)
    os.environ.update(world_of_one(len(here)))
    meeting = FileBarrier(Path(settings.directory), here.index(rank), together)
    measurement = _Measurement(settings, links, [script, *arguments], meeting, is_first=rank == 0)
    watch = StepWatch(measurement.after_step)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        watch.close()
    measurement.finish(watch)


def _links(settings: MeasureSettings) -> tuple[Links, list[list[int]]]:
    """Returns the link properties and the ranks of each host."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return settings.links or Links(UNMEASURED_WITHIN, None, None, reduction_s_per_byte()), [[0]]
    paceline.init_process_group()
    try:
        names: list[object] = [None] * paceline.get_world_size()
        paceline.all_gather_object(names, socket.gethostname())
        hosts = hosts_of([str(name) for name in names])
        return settings.links or measure_links(hosts), hosts
    finally:
        paceline.destroy_process_group()


class _Measurement:
    """Stops the script once all ranks that run at the same time have measured enough steps."""

    def __init__(
        self, settings: MeasureSettings, links: Links, command: Sequence[str], meeting: FileBarrier, *, is_first: bool
    ) -> None:
        self._settings = settings
        self._links = links
        self._command = command
        self._meeting = meeting
        self._is_first = is_first
        self._written = False

    def after_step(self, watch: StepWatch) -> None:
        """Writes the calibration after the last measured step; exits if all ranks are done or this one is far ahead."""
        done, needed = len(watch.steps), LEFT_OUT + self._settings.steps
        if done == 1 and not self._meeting.signal_and_wait("begun", _LATEST_S):
            print("paceline plan: not all ranks of this machine train yet; this one continues", file=sys.stderr)
        if done == needed:
            self._write(watch)
            self._meeting.signal("measured")
        if done >= needed and (self._meeting.all_signalled("measured") or done >= needed * _MOST_EXTRA_STEPS):
            _exit_now()

    def finish(self, watch: StepWatch) -> None:
        """Writes the calibration if the script ended before `after_step` could write it.

        Raises:
            SystemExit: the script ran too few steps.
        """
        if not self._written:
            try:
                self._write(watch)
            except TooFewStepsError as error:
                raise SystemExit(f"paceline plan: {' '.join(self._command)}: {error}") from None
        self._meeting.signal("measured")

    def _write(self, watch: StepWatch) -> None:
        self._written = True
        calibration = calibration_of(watch, self._links, self._command, self._meeting.ranks)
        if self._is_first:
            whole = Path(f"{self._settings.output}.part")
            whole.write_bytes(encode(calibration))
            whole.replace(self._settings.output)


def _exit_now() -> NoReturn:
    """Exits without running the rest of the script, which could overwrite a better model."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
