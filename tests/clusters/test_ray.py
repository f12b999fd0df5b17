"""Tests the output of `paceline launch-script ray` and Paceline's `TorchTrainer` on a Ray cluster of two nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ENVIRONMENT

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(300)]

SCRIPT = """
import os, sys, torch
import paceline as dist
dist.init_process_group()
total = torch.ones(1)
dist.all_reduce(total)
open(f"{sys.argv[1]}{dist.get_rank()}", "w").write(f"{total.item()} {os.environ['GROUP_RANK']}")
sys.exit(sys.argv[2:] == ["fails"])
"""


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes on this machine, with two cores each."""
    pytest.importorskip("ray.train.torch", reason='Ray is not installed (pip install "ray[train]")')
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    node = {"num_cpus": 2, "object_store_memory": 80_000_000}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        made.add_node(**node)
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def submit(cluster, tmp_path):
    """Follows the printed instructions for a script and its arguments, and returns when the job has ended."""

    def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        flags = ["--nodes=2", "--gpus=0", "--cpus=1", "--nproc-per-node=1", "--max-restarts=0"]
        words = [sys.executable, "-m", "paceline", "launch-script", "ray", *flags, script, *arguments]
        driver = tmp_path / "train_ray.py"
        driver.write_text(subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout)
        environment = {**ENVIRONMENT, "RAY_ADDRESS": cluster.address, "RAY_USAGE_STATS_ENABLED": "0"}
        return subprocess.run([sys.executable, driver], capture_output=True, text=True, timeout=120, env=environment)

    return run


def test_two_machines_of_ray_meet_reduce_and_tell_of_a_failure(submit, tmp_path):
    script, base = tmp_path / "train.py", tmp_path / "rank"
    script.write_text(SCRIPT)
    done = submit(str(script), str(base))
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["2.0 0", "2.0 1"]
    failed = submit(str(script), str(base), "fails")
    assert failed.returncode == 1
    assert "failed first" in failed.stdout + failed.stderr


def train_and_report(settings: dict[str, Any]) -> None:
    """The program of each worker."""
    import ray.train.torch
    import torch
    import torch.distributed as torch_dist

    import paceline

    assert torch_dist.get_backend() == "paceline"
    context = ray.train.get_context()
    assert (torch_dist.get_rank(), torch_dist.get_world_size()) == (context.get_world_rank(), 2)
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(2, 1))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"])
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 2), float(step + torch_dist.get_rank()))).mean().backward()
        optimizer.step()
    weights = [torch.empty(1, 2) for _ in range(2)]
    paceline.all_gather(weights, model.module.weight.detach())
    ray.train.report({"weight": weights[0][0, 0].item()})
    assert torch.equal(*weights)
    Path(settings["directory"], str(torch_dist.get_rank())).write_text(str(weights[0][0, 0].item()))


def test_the_torch_trainer_of_ray_reduces_by_paceline(cluster, tmp_path):
    import ray
    import torch
    from ray import cloudpickle
    from ray.train import RunConfig, ScalingConfig

    from paceline.integrations.ray import PacelineConfig, TorchTrainer

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        trainer = TorchTrainer(
            train_and_report,
            train_loop_config={"lr": 0.1, "directory": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
            run_config=RunConfig(storage_path=str(tmp_path / "results")),
        )
        assert trainer.fit().error is None
        with pytest.raises(ValueError, match="reduces CPU tensors only"):
            TorchTrainer(train_and_report, scaling_config=ScalingConfig(num_workers=2, use_gpu=True))
    finally:
        ray.shutdown()
    torch.manual_seed(0)
    expected = torch.nn.Linear(2, 1).weight[0, 0].item() - 0.1 * (0.5 + 1.5 + 2.5)
    assert [float((tmp_path / str(rank)).read_text()) for rank in range(2)] == [pytest.approx(expected, abs=1e-5)] * 2
    assert "secret" not in repr(PacelineConfig())
