"""Detection of schedulers by their documented variables; printed manifests match what is detected."""

from __future__ import annotations

import pytest
from scheduler_environments import OPEN_MPI, SLURM

from paceline.cli.main import parser
from paceline.comm.rendezvous.schedulers import Scheduler, detect, expand_hostlist
from paceline.operate.launch.job import job_of

KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "PACELINE_NODES": "2"}

RAY = {"RAY_JOB_ID": "01", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
       "MASTER_ADDR": "10.1.0.5", "MASTER_PORT": "41234"}  # fmt: skip


def name() -> str:
    return "train-1.train.default.svc.cluster.local"


def test_slurm():
    found = detect(SLURM)
    assert found is not None
    assert (found.name, found.node_rank, found.nodes, found.address) == ("Slurm", 1, 2, "gpu07")
    assert found.port == detect({**SLURM, "SLURM_PROCID": "0"}).port
    assert 20000 <= found.port < 30000
    assert not found.is_one_a_rank


def test_slurm_with_a_task_a_rank():
    tasks = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
    found = detect({**SLURM, **tasks})
    assert (found.node_rank, found.nodes, found.slot, found.is_one_a_rank) == (5, 6, (1, 2), True)


def test_a_step_of_several_slurm_components_is_refused():
    with pytest.raises(ValueError, match="task 2 of 2 .* heterogeneous job"):
        detect({**SLURM, "SLURM_PROCID": "2"})


@pytest.mark.parametrize("missing", ["SLURM_STEP_NODELIST", "SLURM_PROCID"])
def test_the_batch_script_itself_is_not_srun(missing):
    assert detect({key: value for key, value in SLURM.items() if key != missing}) is None


@pytest.mark.parametrize(
    ("short", "hosts"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1,3].x", ["r1n1.x", "r1n3.x", "r2n1.x", "r2n3.x"]),
    ],
)
def test_slurms_short_host_lists(short, hosts):
    assert expand_hostlist(short) == hosts


@pytest.mark.parametrize(
    ("more", "address"),
    [
        ({"OMPI_MCA_orte_hnp_uri": "123.0;tcp://10.0.0.7,172.17.0.1:43210"}, "10.0.0.7"),
        ({"PMIX_NAMESPACE": "prterun-head-4242@1"}, "head"),
        ({"MASTER_ADDR": "h0", "MASTER_PORT": "1234"}, "h0"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "127.0.0.1"),
        ({}, None),
    ],
)
def test_open_mpi(more, address):
    found = detect({**OPEN_MPI, **more})
    assert (found.name, found.node_rank, found.nodes, found.address) == ("Open MPI", 3, 4, address)
    assert found.is_one_a_rank
    assert found.port == (1234 if "MASTER_PORT" in more else found.port)


def test_mpich_and_intel_mpi():
    found = detect({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert (found.name, found.node_rank, found.nodes, found.address) == ("MPI (PMI)", 1, 2, "127.0.0.1")


@pytest.mark.parametrize(
    ("by_mpirun", "scheduler"),
    [
        (OPEN_MPI, "Open MPI"),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, "MPI (PMI)"),
    ],
)
def test_an_mpirun_that_uses_srun_is_what_started_the_ranks(by_mpirun, scheduler):
    found = detect({**SLURM, **by_mpirun})
    assert (found.name, found.node_rank, found.nodes, found.slot) == (scheduler, 3, 4, (1, 2))


def test_ranks_of_srun_that_have_pmi_too_are_slurms():
    found = detect({**SLURM, "PMI_RANK": "1", "PMI_SIZE": "2"})
    assert (found.name, found.address) == ("Slurm", "gpu07")


def test_a_kubernetes_indexed_job():
    found = detect(KUBERNETES, name)
    first = "train-0.train.default.svc.cluster.local"
    assert found == Scheduler("Kubernetes", 1, 2, first, 29500)


def test_a_jobset():
    def pod() -> str:
        return "set-node-0-1.set"

    found = detect({**KUBERNETES, "JOBSET_NAME": "set"}, pod)
    assert (found.name, found.address) == ("Kubernetes (JobSet)", "set-node-0-0.set")


def test_ray_train():
    found = detect(RAY)
    assert (found.name, found.node_rank, found.nodes) == ("Ray", 2, 4)
    assert (found.address, found.port, found.slot) == ("10.1.0.5", 41234, (0, 2))


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_PROCID", "SLURM_NNODES"])
@pytest.mark.parametrize("value", ["many", "", "\u0663"])
def test_a_wrong_number_is_named_with_its_variable(name, value):
    with pytest.raises(ValueError, match=f"environment variable {name} is '{value}'; it must be a whole number"):
        detect({**SLURM, name: value})


def test_a_wrong_port_is_named_with_its_variable():
    for value in ("x", "70000"):
        with pytest.raises(ValueError, match=f"MASTER_PORT is '{value}'; it must be a whole number from 0 to 65535"):
            detect({**OPEN_MPI, "MASTER_PORT": value})


def test_nothing_is_nothing():
    assert detect({}) is None
    assert detect({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}) is None


def job(environment: dict[str, str], *arguments: str):
    return job_of(parser(environment).parse_args(["run", *arguments, __file__]), environment)


def test_in_a_pod_of_kubeflow_its_runtime_says_where_to_meet():
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    told = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29500"}  # fmt: skip
    found = job(pod | told, "--nproc-per-node=4").rendezvous
    assert (found.address, found.node_rank, found.max_nodes) == (("train-node-0-0.train", 29500), 1, 2)
    assert (found.is_static, found.serves) == (True, False)
