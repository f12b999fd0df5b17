"""The fork server of a whole test run: it has imported the slow modules, and forks ranks and elastic workers."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from multiprocessing import forkserver
from pathlib import Path

_TESTS = Path(__file__).parents[1]
_OWN = "PACELINE_TESTS_OWN_PYTHONPATH"


def _take_back_path() -> None:
    os.environ["PYTHONPATH"] = os.environ.pop(_OWN)
    if not os.environ["PYTHONPATH"]:
        del os.environ["PYTHONPATH"]


if _OWN in os.environ:  # this process is the server, and has found this module
    _take_back_path()
    gc.disable()  # the imported modules are not garbage

# Modules that are slow to import or that nearly every rank uses. The suite's own modules come first.
# torch itself would import torch.distributed.tensor and torch._dynamo when a rank first compares tensors or constructs
# an optimizer, which takes 1.5 s.
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
    "huge_pages",
]

# A process has only one server. It imports the modules that were set last, so no other code may set modules.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(_IMPORTED)
_starting = threading.Lock()


def start_server() -> None:
    """Starts the server if necessary. Before Python 3.13 it finds the tests' modules only through PYTHONPATH."""
    with _starting:
        os.environ[_OWN] = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_TESTS), str(_TESTS / "support"), os.environ[_OWN]])
        try:
            forkserver.ensure_running()
        finally:
            _take_back_path()


def begin() -> None:
    """Initializes a fork, which computes with one thread, like a worker of the launcher. Must be called first."""
    import torch

    gc.freeze()  # so that the collector does not scan hundreds of thousands of objects in imported modules
    gc.enable()
    torch.set_num_threads(1)
