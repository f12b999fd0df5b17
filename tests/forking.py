"""One server for the whole test run, with the slow imports behind it: ranks and elastic workers are forks of it."""

from __future__ import annotations

import gc
import multiprocessing

# What takes long to import, and what nearly every rank uses. Modules of the tests are not found by the server before
# Python 3.13, and are small. The last two take a second and a half, and torch imports them when a rank first compares
# tensors or makes an optimizer.
_IMPORTED = [
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "paceline.checkpoint.in_training",
    "paceline.data.evaluation",
    "paceline.data.loader",
    "paceline.data.sampler",
    "paceline.elastic.state",
    "paceline.group.barriers",
    "paceline.group.coalesced",
    "paceline.group.collectives",
    "paceline.group.init",
    "paceline.group.objects.collectives",
    "paceline.group.persistent",
    "paceline.group.point_to_point",
    "paceline.group.queries",
    "paceline.group.rooted",
    "paceline.group.subgroups",
    "paceline.parallel.ddp.module",
    "paceline.parallel.hooks",
    "paceline.parallel.one_copy.optimizer",
    "paceline.parallel.sharded.loader",
    "paceline.parallel.sync_batch_norm",
    "paceline.parallel.zero.grad_scaler",
    "paceline.parallel.zero.optimizer",
    "paceline.store.tcp",
    "hypothesis",
    "pytest",
    "torch.distributed.tensor",
    "torch._dynamo",
]

# There is one server in a process, which is started with the modules that were named last: so nobody else names any.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(_IMPORTED)


def begin() -> None:
    """Is called first in a fork, which has one thread for computations, as a worker of the launcher has."""
    import torch

    gc.freeze()  # the collector need not look through the hundreds of thousands of objects of the imported modules
    torch.set_num_threads(1)
