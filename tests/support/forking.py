"""One server for the whole test run, with the slow imports behind it: ranks and elastic workers are forks of it."""

from __future__ import annotations

import gc
import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path

_TESTS = Path(__file__).parents[1]
_OWN = "PACELINE_TESTS_OWN_PYTHONPATH"


def _take_back_path() -> None:
    os.environ["PYTHONPATH"] = os.environ.pop(_OWN)
    if not os.environ["PYTHONPATH"]:
        del os.environ["PYTHONPATH"]


if _OWN in os.environ:  # this is the server, which has found this module
    _take_back_path()
    gc.disable()  # nothing that it imports is garbage

# What takes long to import, and what nearly every rank uses, that of the tests first. The last two take a second and a
# half, and torch imports them when a rank first compares tensors or makes an optimizer.
_IMPORTED = [
    "world",
    "one_world",
    "hosts.fixture",
    "elastic_job",
    "elastic_programs",
    "forked_launcher",
    "training",
    "values",
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "paceline.train.checkpoint.manager",
    "paceline.train.data.sampler",
    "paceline.train.data.loader",
    "paceline.train.elastic.worker.elastic_state",
    "paceline.comm.group.collectives.collectives",
    "paceline.comm.group.collectives.coalesced",
    "paceline.comm.group.init",
    "paceline.comm.group.collectives.object_collectives",
    "paceline.comm.group.collectives.persistent",
    "paceline.comm.group.collectives.point_to_point",
    "paceline.comm.group.default",
    "paceline.comm.group.subgroups",
    "paceline.train.ddp.distributed_data_parallel",
    "paceline.train.ddp.hooks",
    "paceline.train.shared_model.shared_model_optimizer",
    "paceline.train.logical_shards.shard_loader",
    "paceline.train.sync_batch_norm",
    "paceline.train.divided_gradients",
    "paceline.train.zero.zero_redundancy_optimizer",
    "paceline.comm.store.tcp_store",
    "hypothesis",
    "pytest",
    "torch.distributed.tensor",
    "torch._dynamo",
]

# There is one server in a process, which is started with the modules that were named last: so nobody else names any.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(_IMPORTED)


def start_server() -> None:
    """Starts the server unless it runs. Before Python 3.13 it finds the tests' modules by its environment only."""
    os.environ[_OWN] = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_TESTS), str(_TESTS / "support"), os.environ[_OWN]])
    try:
        forkserver.ensure_running()
    finally:
        _take_back_path()


def begin() -> None:
    """Is called first in a fork, which has one thread for computations, as a worker of the launcher has."""
    import torch

    gc.freeze()  # the collector need not look through the hundreds of thousands of objects of the imported modules
    gc.enable()
    torch.set_num_threads(1)
