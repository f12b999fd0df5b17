"""Startup and shutdown of `paceline.horovod`, and programs for Horovod that run with it unchanged."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from launching import run, wait_until

import paceline
import paceline.horovod as hvd
from paceline.horovod import basics


def squared(number: int) -> tuple[int, int]:
    hvd.init()
    return hvd.rank(), number**2


def test_run_returns_what_the_ranks_return(monkeypatch):
    # The ranks are forks of a process that has imported torch. With the default start method, each rank would import
    # it.
    monkeypatch.setattr(basics, "spawn", partial(paceline.spawn, start_method="forkserver"))
    assert hvd.run(squared, args=(3,), np=2, hosts="localhost:2", verbose=True) == [(0, 9), (1, 9)]
    with pytest.raises(ValueError, match="paceline run"):
        hvd.run(squared, np=2, hosts="a:1,b:1")


ALONE = """
import horovod.torch as hvd
import torch
hvd.init()
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.util import check_extension, gpu_available, split_list
from horovod.runner import run
from horovod.torch import mpi_ops
from horovod.torch.compression import Compression
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import allreduce, rank
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm
import horovod, os
assert rank() == hvd.rank() and mpi_ops.size() == 2 and allreduce is hvd.allreduce is hvd.mpi_ops.allreduce
assert HorovodInternalError is hvd.HorovodInternalError and run is horovod.run and Compression is hvd.Compression
assert SyncBatchNorm is hvd.SyncBatchNorm and DistributedOptimizer is hvd.DistributedOptimizer
check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
assert [list(each) for each in split_list([1, 2, 3], 2)] == [[1, 2], [3]]
try:
    import horovod.torch.elastic
except ImportError as error:
    assert "paceline.ElasticState" in str(error)
else:
    raise AssertionError
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
mine = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
assert [int(os.environ[f"HOROVOD_{name}"]) for name in names] == list(mine)
hvd.shutdown()
hvd.init()
print(hvd.allreduce(torch.ones(2)).tolist(), hvd.size(), hvd.__name__)
"""


def test_a_script_of_horovod_runs_as_it_is(script):
    done = run("--compat", "horovod", "--nproc-per-node", "2", script(ALONE))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] [1.0, 1.0] 2 horovod.torch" for rank in range(2)]
    assert (done.stdout + done.stderr).count("--compat horovod") == 1


def test_another_launcher_is_not_taken_for_a_job_of_one(monkeypatch, no_secret):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="paceline run --nproc-per-node"):
        hvd.init()


def leaves_a_call_behind(left: Path) -> str:
    hvd.init()
    handle = hvd.allreduce_async(torch.ones(2), name="alone") if hvd.rank() == 0 else None
    hvd.barrier()
    if handle is not None:
        hvd.shutdown()
        left.touch()
        with pytest.raises(hvd.HorovodInternalError, match=r"(?s)allreduce\(float32 \[2\], op=AVG, name='alone'\)"):
            hvd.synchronize(handle)
    else:
        wait_until(left.exists)  # otherwise, the call could complete before rank 0 leaves
        with pytest.raises(hvd.HorovodInternalError, match="rank 0"):
            hvd.allreduce(torch.ones(2), name="alone")
        hvd.shutdown()
    with pytest.raises(ValueError, match="init"):
        hvd.allreduce(torch.ones(2))
    return "left"


def test_shutdown_ends_calls_under_way(ranks, tmp_path):
    assert ranks(2)(leaves_a_call_behind, tmp_path / "left") == ["left", "left"]
