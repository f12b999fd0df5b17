"""What `paceline launch-script ray` prints, followed on a cluster of two nodes; skipped where Ray is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from launching import ENVIRONMENT

pytestmark = pytest.mark.timeout(300)

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
def submit(tmp_path):
    """Follows the printed driver's advice with a script and its arguments, and returns when the job is over."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install ray)")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)

    def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        flags = ["--nodes=2", "--gpus=0", "--cpus=1", "--nproc-per-node=1", "--max-restarts=0"]
        words = [sys.executable, "-m", "paceline", "launch-script", "ray", *flags, script, *arguments]
        driver = tmp_path / "train_ray.py"
        driver.write_text(subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout)
        environment = {**ENVIRONMENT, "RAY_ADDRESS": cluster.address, "RAY_USAGE_STATS_ENABLED": "0"}
        return subprocess.run([sys.executable, driver], capture_output=True, text=True, timeout=120, env=environment)

    yield run
    cluster.shutdown()


def test_two_machines_of_ray_meet_reduce_and_tell_of_a_failure(submit, tmp_path):
    script, base = tmp_path / "train.py", tmp_path / "rank"
    script.write_text(SCRIPT)
    done = submit(str(script), str(base))
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["2.0 0", "2.0 1"]
    failed = submit(str(script), str(base), "fails")
    assert failed.returncode == 1
    assert "failed first" in failed.stdout + failed.stderr
