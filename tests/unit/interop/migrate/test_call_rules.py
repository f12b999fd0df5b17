"""Rules for call arguments: the backend, and the comments about remaining work."""

from __future__ import annotations

import re

import pytest
from migrated_text import migrated

from paceline.interop.migrate.names import MARK, MigrationMode, score


def todo(text: str) -> str:
    """Returns the comment that was inserted, on one line."""
    found = re.search(rf"# {re.escape(MARK)}((?:.*\n)(?:\s*#   .*\n)*)", text)
    return re.sub(r"\n\s*#  ", "", found[1]).strip() if found else ""


def test_with_the_plugin_only_the_backend_changes():
    before = (
        "import torch\nimport torch.distributed as dist\nfrom torch.distributed.fsdp import fully_shard\n"
        'dist.init_process_group(backend="gloo")\nfully_shard(m)\nb = dist.get_default_backend_for_device("cpu")\n'
    )
    done = migrated(before)
    after = before.replace('"gloo"', '"paceline"').replace("b = dist.", "b = paceline.")
    assert done.text == after.replace("import torch\n", "import torch\nimport paceline\n")
    assert score(done.places) == (5, 5)


@pytest.mark.parametrize(
    ("call", "new"),
    [
        ("dist.init_process_group()", 'dist.init_process_group(backend="paceline")'),
        ("dist.init_process_group(rank=0)", 'dist.init_process_group(rank=0, backend="paceline")'),
        ("dist.init_process_group(*args)", None),
        ('dist.init_process_group("nccl")', None),
    ],
)
def test_the_plugin_is_named_where_no_backend_is(call, new):
    head = "import torch.distributed as dist\n"
    assert migrated(f"{head}{call}\n", MigrationMode.PLUGIN).text == f"{head}{new or call}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import torch.multiprocessing as mp\nc = mp.spawn(f, nprocs=2, join=False)", "pids()"),
        ("import torch.distributed as d\nd.init_process_group('gloo', pg_options=o)", "pg_options"),
        ("import torchmetrics, torch.distributed as d\nd.init_process_group('cpu:gloo,cuda:nccl')", "2.14"),
        ("import torchmetrics, torch.distributed as d\nd.init_process_group(); m.cuda()", "specify the backend"),
        ("import horovod.torch as hvd\nhvd.elastic.run(f)", "paceline.ElasticState"),
        ("import horovod.torch as hvd\nhvd.start_timeline('f')", "no start_timeline"),
        ("import horovod.tensorflow as hvd", "another library"),
        ("from accelerate import Accelerator\na = Accelerator()", "init_process_group"),
        ("import lightning as L\nt = L.Trainer()", "process_group_backend"),
        ("from horovod.torch import *", "import each name"),
    ],
)
def test_what_is_left_to_do_is_said_with_its_reason(text, words):
    done = migrated(f"{text}\n")
    left = [place for place in done.places if not place.is_migrated_fully]
    assert len(left) == 1
    assert words in left[0].reason
    assert todo(done.text) == left[0].reason
    again = migrated(done.text)
    assert again.text.count(MARK) == 1, "a second run says it again"
