"""Runs `paceline launch-script`, which prints what a scheduler needs to start a job."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("kind", choices=("slurm", "k8s", "jobset", "kubeflow", "ray"), help="for which scheduler")
    parser.add_argument("--nodes", type=int, default=2, help="machines (default: 2)")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", default="gpu", help="workers of each (default: gpu)")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of each machine, 0 for none (default: 8)")
    parser.add_argument("--cpus", type=int, default=8, help="cores of each machine (default: 8)")
    parser.add_argument("--memory", default="32Gi", help="memory of each pod (default: 32Gi)")
    parser.add_argument("--name", help="the job's name (default: the script's)")
    parser.add_argument("--image", default="REGISTRY/IMAGE:TAG", help="the pods' image")
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=3,
        help="how often failed workers are restarted, and in Kubernetes also the pods (default: 3)",
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...")


def run(options: argparse.Namespace) -> int:
    """Prints the script or manifest; returns 0."""
    from paceline.launch.manifests import KINDS, Request

    name = options.name or Path(options.script).stem.lower().replace("_", "-")
    workers = "cpu" if options.nproc_per_node == "gpu" and not options.gpus else options.nproc_per_node
    request = Request(
        (options.script, *options.args),
        nodes=options.nodes,
        workers=workers,
        gpus=options.gpus,
        cpus=options.cpus,
        memory=options.memory,
        name=name,
        image=options.image,
        max_restarts=options.max_restarts,
    )
    print(KINDS[options.kind](request), end="")
    return 0
