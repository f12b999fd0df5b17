"""Reports about cores and GPUs, which are printed before workers start."""

from __future__ import annotations

from paceline.operate.launch.job import Command, Job
from paceline.operate.launch.workers.start_workers import MachineResources

JOB = Job(Command(("x.py",)), workers=4)


def test_two_workers_on_one_gpu_are_reported():
    (line,) = MachineResources(4, 2, None, None).remarks(JOB)
    assert "4 workers share 2 GPUs: local ranks 0 and 2 both get GPU 0" in line
    assert "--nproc-per-node 2 (or gpu)" in line
    assert MachineResources(4, 4, None, None).remarks(JOB) == []
    assert MachineResources(4, 0, None, None).remarks(JOB) == []


def test_what_was_decided_about_cores_is_said():
    (line,) = MachineResources(2, 0, [(0, 1), (2, 3)], 2).remarks(JOB)
    assert line.startswith("OMP_NUM_THREADS=2 for each of 2 workers on cores 0-1 | 2-3")
