"""Generation of batch scripts, manifests and drivers for schedulers (`paceline launch-script`)."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Callable
from dataclasses import dataclass

_PORT = 29500


@dataclass(frozen=True)
class LaunchScriptOptions:
    """Parameters of a scheduled job. `gpus`, `cpus` and `memory` are per machine."""

    argv: tuple[str, ...]  # script and its arguments
    nodes: int = 2
    workers: str = "gpu"  # value for --nproc-per-node
    gpus: int = 8
    cpus: int = 8
    memory: str = "32Gi"
    name: str = "train"
    image: str = "REGISTRY/IMAGE:TAG"
    max_restarts: int = 3

    @property
    def run(self) -> list[str]:
        """The command to run on each machine. It does not contain any addresses."""
        flags = [f"--nproc-per-node={self.workers}", f"--max-restarts={self.max_restarts}"]
        return ["paceline", "run", *flags, *self.argv]


def slurm(request: LaunchScriptOptions) -> str:
    """Returns a script for sbatch. The job creates a secret, which srun distributes without storing it in a file.

    If a machine is lost, Slurm requeues the job. The launchers on the other machines exit long before the job is
    requeued, but srun waits until Slurm has determined the state of each machine.
    """
    gpus = f"#SBATCH --gpus-per-node={request.gpus}\n" if request.gpus else ""
    return f"""#!/bin/bash
# sbatch {request.name}.sbatch
#SBATCH --job-name={request.name}
#SBATCH --nodes={request.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={request.cpus}
{gpus}#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
PACELINE_SECRET=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export PACELINE_SECRET
# One launcher for each machine; machine 0 and the port are taken from Slurm's variables.
srun --kill-on-bad-exit=1 {shlex.join(request.run)}
"""


def _resources(request: LaunchScriptOptions) -> str:
    limits = {"cpu": str(request.cpus), "memory": request.memory}
    if request.gpus:
        limits["nvidia.com/gpu"] = str(request.gpus)
    return f"{{limits: {json.dumps(limits)}}}"


def _pod(request: LaunchScriptOptions, indent: int) -> str:
    text = f"""spec:
  subdomain: {request.name}
  restartPolicy: Never
  terminationGracePeriodSeconds: 60
  containers:
    - name: main
      image: {request.image}
      command: {json.dumps(request.run)}
      env:
        - name: PACELINE_NODES
          value: "{request.nodes}"
        - name: PACELINE_SECRET
          valueFrom: {{secretKeyRef: {{name: {request.name}-paceline, key: secret}}}}
      ports: [{{containerPort: {_PORT}}}]
      resources: {_resources(request)}
      volumeMounts: [{{name: shm, mountPath: /dev/shm}}]
  volumes:
    - name: shm  # the default size of 64 MiB is too small for DataLoader workers
      emptyDir: {{medium: Memory}}
"""
    return text.replace("\n", "\n" + " " * indent).rstrip() + "\n"


def _secret(request: LaunchScriptOptions) -> str:
    return f"""apiVersion: v1
kind: Secret
metadata: {{name: {request.name}-paceline}}
stringData: {{secret: "{secrets.token_hex(32)}"}}
---
"""


def kubernetes(request: LaunchScriptOptions) -> str:
    """Returns a manifest for kubectl apply: an indexed Job, and a headless Service that provides the pods' names."""
    return f"""# kubectl apply -f {request.name}.yaml
{_secret(request)}apiVersion: v1
kind: Service
metadata: {{name: {request.name}}}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{job-name: {request.name}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: {request.name}}}
spec:
  completionMode: Indexed
  completions: {request.nodes}
  parallelism: {request.nodes}
  backoffLimit: {request.nodes * request.max_restarts}  # all pods are restarted together
  template:
    {_pod(request, 4)}"""


def jobset(request: LaunchScriptOptions) -> str:
    """Returns a JobSet with one indexed Job. The JobSet provides the pods' names."""
    return f"""# kubectl apply -f {request.name}.yaml
{_secret(request)}apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {{name: {request.name}}}
spec:
  failurePolicy: {{maxRestarts: {request.max_restarts}}}
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {request.nodes}
          parallelism: {request.nodes}
          backoffLimit: 0
          template:
            {_pod(request, 12).replace(f"subdomain: {request.name}", "# the JobSet sets the subdomain")}"""


def kubeflow(request: LaunchScriptOptions) -> str:
    """Returns a TrainJob for Kubeflow Trainer, whose torch runtime passes the rendezvous address to each launcher."""
    return f"""# kubectl apply -f {request.name}.yaml
{_secret(request)}apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {{name: {request.name}}}
spec:
  runtimeRef: {{name: torch-distributed}}
  trainer:
    image: {request.image}
    command: {json.dumps(request.run)}
    numNodes: {request.nodes}
    resourcesPerNode: {_resources(request)}
    env:
      - name: PACELINE_SECRET
        valueFrom: {{secretKeyRef: {{name: {request.name}-paceline, key: secret}}}}
"""


def ray(request: LaunchScriptOptions) -> str:
    """Returns a driver for a Ray cluster. The driver starts one launcher on each machine."""
    bundle = {"CPU": request.cpus, **({"GPU": request.gpus} if request.gpus else {})}
    return f'''"""ray job submit --working-dir . -- python {request.name}_ray.py"""

import os
import secrets
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = {request.nodes}
COMMAND = [sys.executable, "-m", *{request.run!r}]


@ray.remote(num_cpus={request.cpus}, num_gpus={request.gpus})
class Machine:
    def address(self):
        return ray.util.get_node_ip_address()

    def run(self, number, address, secret):
        place = {{"PET_NNODES": str(NODES), "PET_NODE_RANK": str(number), "PET_MASTER_ADDR": address}}
        return subprocess.call(COMMAND, env={{**os.environ, **place, "PACELINE_SECRET": secret}})


ray.init()
group = placement_group([{bundle!r}] * NODES, strategy="STRICT_SPREAD")
ray.get(group.ready())
machines = [
    Machine.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, number)).remote()
    for number in range(NODES)
]
address = ray.get(machines[0].address.remote())
secret = secrets.token_hex(32)
sys.exit(max(ray.get([each.run.remote(number, address, secret) for number, each in enumerate(machines)])))
'''


KINDS: dict[str, Callable[[LaunchScriptOptions], str]] = {
    "slurm": slurm,
    "k8s": kubernetes,
    "jobset": jobset,
    "kubeflow": kubeflow,
    "ray": ray,
}
