"""Jobs that a scheduler has started."""

from __future__ import annotations

import pytest
from scheduler_environments import OPEN_MPI, SLURM

from paceline.cli.main import parser
from paceline.operate.launch.job import job_of
from paceline.operate.launch.option_types import OptionError


def job(environment: dict[str, str], *arguments: str):
    return job_of(parser(environment).parse_args(["run", *arguments, __file__]), environment)


def test_under_slurm_no_addresses_are_needed():
    found = job(SLURM, "--nproc-per-node=4")
    assert (found.rendezvous.address[0], found.rendezvous.node_rank, found.rendezvous.max_nodes) == ("gpu07", 1, 2)
    assert (found.workers, found.slot) == (4, (0, 1))


def test_with_a_launcher_a_rank_each_has_one_worker_in_its_place():
    found = job({**OPEN_MPI, "MASTER_ADDR": "h0"}, "--nproc-per-node=4")
    assert (found.workers, found.slot, found.rendezvous.node_rank) == (1, (1, 2), 3)


def test_flags_have_the_last_word():
    found = job(SLURM, "--nnodes=2", "--node-rank=0", "--master-addr=other", "--master-port=1234")
    assert (found.rendezvous.address, found.rendezvous.node_rank) == (("other", 1234), 0)
    assert job(SLURM, "--standalone").rendezvous.address is None


def test_in_a_worker_the_scheduler_speaks_of_the_job_around_it():
    assert job({**SLURM, "PACELINE_JOB": "d0e1.1."}).rendezvous.address is None


@pytest.mark.parametrize("value", ["x", "-1", "nan", "inf"])
def test_a_rendezvous_setting_that_is_no_time_is_refused(value):
    with pytest.raises(OptionError, match=f"--rdzv-conf timeout: '{value}' is not a number of seconds"):
        job({}, "--nnodes=2", "--node-rank=0", "--master-addr=h0", f"--rdzv-conf=timeout={value}")


def test_more_workers_than_processes_are_refused():
    with pytest.raises(OptionError, match="--nproc-per-node 100000000 is too large"):
        job({}, "--nproc-per-node=100000000")
