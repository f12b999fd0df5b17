"""Scripts and manifests that start a job under a scheduler."""

from __future__ import annotations

import ast
import subprocess

import pytest

from paceline.cli.main import main, parser
from paceline.operate.launch.job import job_of
from paceline.operate.launch.launch_script import KINDS, LaunchScriptOptions


def name() -> str:
    return "train-1.train.default.svc.cluster.local"


def job(environment: dict[str, str], *arguments: str):
    return job_of(parser(environment).parse_args(["run", *arguments, __file__]), environment)


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


def test_kubeflows_manifest_leaves_the_rendezvous_to_its_runtime():
    yaml = pytest.importorskip("yaml")
    secret, job = yaml.safe_load_all(KINDS["kubeflow"](REQUEST))
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["command"][:2]) == (4, ["paceline", "run"])
    (variable,) = trainer["env"]  # Kubeflow rejects variables that it sets itself, such as PET_NNODES
    assert variable["valueFrom"]["secretKeyRef"]["name"] == secret["metadata"]["name"]


# The fields at these paths in the APIs of Kubernetes, JobSet v1alpha2 and Kubeflow Trainer v1alpha1, limited to those
# that the manifests use. tests/clusters/test_manifest_schemas.py compares the manifests with the published schemas.
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
