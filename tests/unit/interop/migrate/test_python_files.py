"""`paceline migrate` on Python files: the code before and after, remaining work, and the score."""

from __future__ import annotations

import ast

import pytest
from migrated_text import migrated

from paceline.interop.migrate.names import MARK, MigrationMode, score
from paceline.interop.migrate.python_files import choose_mode, migrate_python, summary_of
from paceline.interop.migrate.python_source import read_source

# A program before and after its migration, by the feature that it shows; None if nothing changes. For all of these
# programs, it is sufficient to change the imports.
IMPORTS = {
    "an alias": ("import torch.distributed as dist\ndist.barrier()\n", "import paceline as dist\ndist.barrier()\n"),
    "from torch": (
        "from torch import distributed as dist, nn\ndist.get_rank()\n",
        "from torch import nn\nimport paceline as dist\ndist.get_rank()\n",
    ),
    "names": (
        "from torch.distributed import init_process_group, ReduceOp as Op  # both\n",
        "from paceline import init_process_group, ReduceOp as Op  # both\n",
    ),
    "a list in brackets": (
        "from torch.distributed import (\n    get_rank,\n    all_reduce,\n)\n",
        "from paceline import (\n    get_rank,\n    all_reduce,\n)\n",
    ),
    "a written-out name": (
        "import torch\nprint(torch.distributed.get_rank())\n",
        "import torch\nimport paceline\nprint(paceline.get_rank())\n",
    ),
    "a module without an alias": (
        "import torch.distributed\nx = torch.ones(torch.distributed.get_world_size())\n",
        "import torch\nimport paceline\nx = torch.ones(paceline.get_world_size())\n",
    ),
    "a module beside torch": (
        "import torch\nimport torch.distributed\ntorch.distributed.barrier()\n",
        "import torch\nimport paceline\npaceline.barrier()\n",
    ),
    "in a function": (
        "def f():\n    import torch.distributed as dist\n    return dist.get_rank()\n",
        "def f():\n    import paceline as dist\n    return dist.get_rank()\n",
    ),
    "in one line": ("import os; import torch.distributed as d\n", "import os; import paceline as d\n"),
    "a constant": (
        "import torch.distributed as dist\ndist.all_reduce(x, op=dist.ReduceOp.SUM)\n",
        "import paceline as dist\ndist.all_reduce(x, op=dist.ReduceOp.SUM)\n",
    ),
    "DDP": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\nm = DDP(m)\n",
        "from paceline import DistributedDataParallel as DDP\nm = DDP(m)\n",
    ),
    "DDP by way of nn": (
        "import torch\nfrom torch import nn\nm = nn.parallel.DistributedDataParallel(m)\n",
        "import torch\nimport paceline\nfrom torch import nn\nm = paceline.DistributedDataParallel(m)\n",
    ),
    "SyncBatchNorm": (
        "import torch\nm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)\n",
        "import torch\nimport paceline\nm = paceline.SyncBatchNorm.convert_sync_batchnorm(m)\n",
    ),
    "a sampler": (
        "from torch.utils.data.distributed import DistributedSampler\ns = DistributedSampler(d)\n",
        "from paceline import DistributedSampler\ns = DistributedSampler(d)\n",
    ),
    "a sampler among others": (
        "from torch.utils.data import DataLoader, DistributedSampler, Dataset\n",
        "from torch.utils.data import DataLoader, Dataset\nfrom paceline import DistributedSampler\n",
    ),
    "spawn": (
        "import torch.multiprocessing as mp\nmp.spawn(main, args=(2,), nprocs=2)\n",
        "import torch.multiprocessing as mp\nimport paceline\npaceline.spawn(main, args=(2,), nprocs=2)\n",
    ),
    "hooks": (
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks\n"
        "m.register_comm_hook(None, hooks.fp16_compress_hook)\n",
        "import paceline.parallel.hooks as hooks\nm.register_comm_hook(None, hooks.fp16_compress_hook)\n",
    ),
    "ZeRO": (
        "from torch.distributed.optim import ZeroRedundancyOptimizer\n",
        "from paceline import ZeroRedundancyOptimizer\n",
    ),
    "what makes no group": (
        "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main(): pass\n",
        None,
    ),
    "a model of a library": (
        "from transformers import GPT2LMHeadModel\nimport torch.distributed as dist\n",
        "from transformers import GPT2LMHeadModel\nimport paceline as dist\n",
    ),
    "another name": ("def f(dist):\n    return dist.get_rank()\n", None),
    "a name that hides the import": (
        "import torch.distributed as dist\ndef f(dist):\n    return dist.Store\ndist.Store\n",
        "import paceline as dist\ndef f(dist):\n    return dist.Store\ndist.Store\n",
    ),
    "a module after the future": (
        "from __future__ import annotations\nimport os\nfrom torch import nn\nnn.parallel.DistributedDataParallel(m)\n",
        "from __future__ import annotations\nimport os\nfrom torch import nn\nimport paceline\n"
        "paceline.DistributedDataParallel(m)\n",
    ),
}

CALLS = {
    "gloo": ('init("gloo")', 'init("paceline")'),
    "gloo by keyword": ("init(backend='gloo', rank=r)", "init(backend='paceline', rank=r)"),
    "a choice": ('init("nccl" if cuda else "gloo")', 'init("nccl" if cuda else "paceline")'),
    "a mixture": ('init("cpu:gloo,cuda:nccl")', 'init("cpu:paceline,cuda:nccl")'),
    "nccl": ('init("nccl")', None),
    "none": ("init()", None),
    "a variable": ('b = "gloo"\ninit(b)\nif b == "gloo": pass', 'b = "paceline"\ninit(b)\nif b == "paceline": pass'),
    "a default": ('def f(b="gloo"):\n    init(backend=b)', 'def f(b="paceline"):\n    init(backend=b)'),
    "an option": (
        'p.add_argument("--dist-backend", default="gloo", choices=["gloo", "nccl"])\ninit(args.dist_backend)',
        'p.add_argument("--dist-backend", default="paceline", choices=["paceline", "nccl"])\ninit(args.dist_backend)',
    ),
    "a member of Backend": ("init(dist.Backend.GLOO)", "init(dist.Backend.PACELINE)"),
    "a question": ('init("gloo")\ndist.get_backend() == "gloo"', 'init("paceline")\ndist.get_backend() == "paceline"'),
    "other strings": ('x = "gloo"', None),
    "ranks in order": ("dist.new_group([0, 2])", None),
    "ranks of a range": ("dist.new_group(list(range(4)))", None),
    "ranks in an order": ("dist.new_group([2, 0])", "dist.new_group([2, 0], sort_ranks=True)"),
    "ranks not known": ("dist.new_group(ranks=r,)", "dist.new_group(ranks=r, sort_ranks=True,)"),
    "the group's backend": ('dist.new_group(backend="gloo")', 'dist.new_group(backend="paceline")'),
}

HOROVOD = {
    "an alias": ("import horovod.torch as hvd\nhvd.init()\n", "import paceline.horovod as hvd\nhvd.init()\n"),
    "names": ("from horovod.torch import init, rank\n", "from paceline.horovod import init, rank\n"),
    "without an alias": (
        "import horovod.torch\nhorovod.torch.init()\n",
        "import paceline.horovod\npaceline.horovod.init()\n",
    ),
    "run": ("import horovod\nhorovod.run(f, np=2)\n", "import paceline.horovod as horovod\nhorovod.run(f, np=2)\n"),
    "a module of it": (
        "from horovod.torch.mpi_ops import allreduce_async\n",
        "from paceline.horovod import allreduce_async\n",
    ),
}

# Code that prevents the migration from torch.distributed.
TORCHS = (
    "from torch.distributed.fsdp import fully_shard",
    "from torch.distributed.device_mesh import init_device_mesh",
    "import torch.distributed.rpc as rpc",
    "import torch.distributed.checkpoint as dcp",
    "from torch.distributed.tensor.parallel import parallelize_module",
    "import torch.distributed as dist\ndist.init_device_mesh('cpu', (2,))",
    "import torch.distributed.distributed_c10d as c10d\nc10d._get_default_group()",
    "from torch.distributed import *",
    "import torchmetrics",
    "from lightning.pytorch import Trainer",
    "from transformers import TrainingArguments",
)


@pytest.mark.parametrize("name", IMPORTS)
def test_names_of_torch_become_pacelines(name):
    before, after = IMPORTS[name]
    done = migrated(before)
    assert done.text == (before if after is None else after)
    assert all(place.is_migrated_fully for place in done.places)
    ast.parse(done.text)


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_calls_keep_their_meaning(name):
    head, before = (
        "import torch.distributed as dist\nfrom torch.distributed import init_process_group as init\n",
        CALLS[name],
    )
    done = migrated(f"{head}{before[0]}\n")
    new_head = "import paceline as dist\nfrom paceline import init_process_group as init\n"
    assert done.text == f"{new_head}{before[0] if before[1] is None else before[1]}\n"


@pytest.mark.parametrize("name", HOROVOD)
def test_horovods_names_lead_to_pacelines(name):
    before, after = HOROVOD[name]
    for way in MigrationMode:
        assert migrated(before, way).text == after


@pytest.mark.parametrize("text", TORCHS)
def test_what_is_built_on_torchs_groups_keeps_torch(text):
    reading = read_source(text)
    choice = choose_mode({"train.py": reading}, {})
    assert choice.way is MigrationMode.PLUGIN
    assert choice.reason.startswith("train.py:")
    assert migrate_python(reading, choice.way).text.endswith(text)


def test_a_library_that_finds_a_group_needs_nothing():
    text = (
        "import torch.distributed as dist\nfrom accelerate import Accelerator\n"
        "dist.init_process_group('gloo')\nAccelerator(cpu=True)\n"
    )
    done = migrated(text)
    assert done.text == text.replace("gloo", "paceline")
    assert score(done.places) == (2, 2)


def test_a_comment_stands_above_its_statement_and_is_indented():
    done = migrated("import horovod.torch as hvd\ndef f():\n    x = 1\n    return hvd.elastic.run(x)\n")
    lines = done.text.splitlines()
    assert lines[3].startswith(f"    # {MARK}")
    assert lines[-1] == "    return hvd.elastic.run(x)"


def test_everything_else_stays_as_it_was():
    head = "#!/usr/bin/env python\n# -*- coding: utf-8 -*-\n'''Doc.'''\r\nx   =  [1,2 , ]\t# odd\n"
    text = f"{head}import torch.distributed as dist"
    assert migrated(text).text == text.replace("torch.distributed", "paceline")


def test_a_migrated_program_is_not_changed_again():
    for before, _ in IMPORTS.values():
        once = migrated(before).text
        assert migrated(once).text == once


def test_no_program_of_the_other_tests_is_left_out():
    for before, after in IMPORTS.values():
        assert summary_of(before).needs_migration or after is None or before == after
