"""Detection of schedulers by their documented variables; printed manifests match what is detected."""

from __future__ import annotations

import ast
import subprocess

import pytest

from paceline.cli.main import main, parser
from paceline.comm.rendezvous.schedulers import Scheduler, detect, expand_hostlist
from paceline.operate.launch.job import job_of
from paceline.operate.launch.launch_script import KINDS, LaunchScriptOptions

SLURM = {  # srun on two machines, one task each, as seen by the second
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[07,09]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
OPEN_MPI = {  # mpirun -np 4 on two machines, as seen by rank 3
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
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


def test_nothing_is_nothing():
    assert detect({}) is None
    assert detect({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}) is None


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


REQUEST = LaunchScriptOptions(("train.py", "--epochs", "3"), nodes=4, name="digits")


def test_the_slurm_script_is_a_shell_script():
    text = KINDS["slurm"](REQUEST)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert "#SBATCH --nodes=4\n" in text
    assert "#SBATCH --requeue\n" in text
    assert "srun --kill-on-bad-exit=1 paceline run --nproc-per-node=gpu --max-restarts=3 train.py --epochs 3\n" in text


@pytest.mark.parametrize("kind", ["k8s", "jobset"])
def test_the_manifests_are_yaml(kind):
    yaml = pytest.importorskip("yaml")
    secret, *rest = yaml.safe_load_all(KINDS[kind](REQUEST))
    assert len(secret["stringData"]["secret"]) == 64
    spec = rest[-1]["spec"]
    job = spec if kind == "k8s" else spec["replicatedJobs"][0]["template"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)
    pod = job["template"]["spec"]
    variables = {each["name"]: each for each in pod["containers"][0]["env"]}
    assert variables["PACELINE_NODES"]["value"] == "4"
    assert variables["PACELINE_SECRET"]["valueFrom"]["secretKeyRef"]["name"] == secret["metadata"]["name"]
    assert pod["containers"][0]["command"][:2] == ["paceline", "run"]
    assert kind == "jobset" or pod["subdomain"] == rest[0]["metadata"]["name"]


def test_kubeflows_manifest_leaves_the_meeting_to_its_runtime():
    yaml = pytest.importorskip("yaml")
    secret, job = yaml.safe_load_all(KINDS["kubeflow"](REQUEST))
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["command"][:2]) == (4, ["paceline", "run"])
    (variable,) = trainer["env"]  # Kubeflow refuses those that it sets itself: PET_NNODES and the like
    assert variable["valueFrom"]["secretKeyRef"]["name"] == secret["metadata"]["name"]


def test_in_a_pod_of_kubeflow_its_runtime_says_where_to_meet():
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    told = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29500"}  # fmt: skip
    found = job(pod | told, "--nproc-per-node=4").rendezvous
    assert (found.address, found.node_rank, found.max_nodes) == (("train-node-0-0.train", 29500), 1, 2)
    assert (found.is_static, found.serves) == (True, False)


# The fields that the APIs of Kubernetes, JobSet v1alpha2 and Kubeflow Trainer v1alpha1 have at these places, as far as
# the manifests use them. tests/clusters/test_manifest_schemas.py compares with what is published.
FIELDS = {
    "Secret": {"apiVersion", "kind", "metadata", "stringData"},
    "Service": {"apiVersion", "kind", "metadata", "spec"},
    "Service/spec": {"clusterIP", "publishNotReadyAddresses", "selector"},
    "Job/spec": {"completionMode", "completions", "parallelism", "backoffLimit", "template"},
    "JobSet/spec": {"failurePolicy", "replicatedJobs"},
    "JobSet/spec/failurePolicy": {"maxRestarts"},
    "JobSet/spec/replicatedJobs": {"name", "replicas", "template"},
    "TrainJob/spec": {"runtimeRef", "trainer"},
    "TrainJob/spec/trainer": {"image", "command", "numNodes", "resourcesPerNode", "env"},
}


@pytest.mark.parametrize("kind", ["k8s", "jobset", "kubeflow"])
def test_the_manifests_use_fields_that_there_are(kind):
    yaml = pytest.importorskip("yaml")
    looked_at = set()
    for document in yaml.safe_load_all(KINDS[kind](REQUEST)):
        for place, fields in FIELDS.items():
            root, *path = place.split("/")
            found = document if document["kind"] == root else None
            for name in path:
                found = found and found.get(name)
                found = found[0] if isinstance(found, list) else found
            if found is not None:
                looked_at.add(root)
                assert set(found) <= fields, place
        assert document["kind"] in looked_at


def test_the_ray_driver_is_python():
    text = KINDS["ray"](REQUEST)
    ast.parse(text)
    assert "PET_NODE_RANK" in text


def test_each_manifest_has_a_secret_of_its_own():
    assert KINDS["k8s"](REQUEST) != KINDS["k8s"](REQUEST)


def test_the_command_prints_it(capsys):
    assert main(["launch-script", "slurm", "--nodes", "3", "--gpus", "0", "--nproc-per-node", "8", "t.py", "-x"]) == 0
    told = capsys.readouterr().out
    assert "--nodes=3" in told
    assert "gpus-per-node" not in told
    assert "--nproc-per-node=8 --max-restarts=3 t.py -x" in told
