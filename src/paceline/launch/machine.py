"""Decides which cores, threads and GPU each worker of this machine gets, and what the user should know about it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.launch.environment import allowed_cores, threads_per_worker
from paceline.launch.gpus import count_gpus
from paceline.launch.job import Job
from paceline.launch.placement import Cores, cores_of_workers, format_cpulist


@dataclass(frozen=True)
class Machine:
    """This machine's resources, decided before anything starts; `cores` is by local rank, None to bind no worker."""

    workers: int  # on this machine, including those of the scheduler's other launchers
    gpus: int
    cores: list[Cores] | None
    threads: int | None

    @classmethod
    def mine(cls, job: Job) -> Machine:
        """Returns this machine's part of `job`."""
        workers = job.workers * job.slot[1]
        gpus = count_gpus()
        cores = cores_of_workers(job.binding, workers, gpus) if job.binding is not None else None
        if workers == 1 and not job.binding_is_asked_for:
            cores = None  # a single worker may use all cores
        return cls(workers, gpus, cores, threads_per_worker(allowed_cores(), workers, os.environ))

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns `base` with the variables that the workers of this machine share."""
        environment = dict(base)
        if self.threads is not None:
            environment["OMP_NUM_THREADS"] = str(self.threads)
        return environment

    def remarks(self, job: Job) -> list[str]:
        """Returns what the user should know, one line each."""
        lines = []
        if job.scheduler is not None:
            lines.append(f"found {job.scheduler}")
        if self.workers > 1 and self.threads is not None and job.slot[0] == 0:
            bound = ""
            if self.cores is not None:
                bound = f" on cores {' | '.join(map(format_cpulist, self.cores[:16]))} (--no-pin: on any)"
            lines.append(f"OMP_NUM_THREADS={self.threads} for each of {self.workers} workers{bound}")
        if self.cores is None and job.binding_is_asked_for:
            lines.append(f"--numa-binding exclusive: {self.workers} workers have too few cores; none is bound")
        if 0 < self.gpus < self.workers and not job.virtual_local_rank:
            lines.append(
                f"{self.workers} workers share {self.gpus} GPU{'s' if self.gpus > 1 else ''}: local ranks 0 and "
                f"{self.gpus} both get GPU 0. Each slows the other down and needs its memory; "
                f"--nproc-per-node {self.gpus} (or gpu) gives each worker its own"
            )
        return lines
