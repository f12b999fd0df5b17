"""Files without code to migrate are skipped without being parsed, and no other files are skipped."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline.interop.migrate import python_source
from paceline.interop.migrate.call_rules import ADVICE_FOR_CALLS
from paceline.interop.migrate.names import MigrationMode, group_user, is_migrated, needs_torchs_groups
from paceline.interop.migrate.python_files import choose_mode, imports_of, summary_of
from paceline.interop.migrate.python_source import PythonSource, read_source

MODULES = (
    "torch", "torch.distributed", "torch.nn", "torch.nn.parallel", "torch.utils.data", "torch.multiprocessing",
    "horovod", "horovod.torch", "timm", "timm.utils", "timm.models", "transformers", "accelerate", "lightning.pytorch",
    "apex.parallel", "os", "distributed",
)  # fmt: skip
PARTS = (
    "distributed", "nn", "parallel", "DistributedDataParallel", "SyncBatchNorm", "Linear", "spawn", "utils", "Trainer",
    "all_reduce", "fsdp", "FullyShardedDataParallel", "torch", "Accelerator", "run", "data", "DistributedSampler",
)  # fmt: skip

modules, parts, aliases = st.sampled_from(MODULES), st.sampled_from(PARTS), st.sampled_from(["a", "b", "nn", "torch"])
imports = st.one_of(
    st.builds("import {}".format, modules),
    st.builds("import {} as {}".format, modules, aliases),
    st.builds("from {} import {}".format, modules, parts),
    st.builds("from {} import {} as {}".format, modules, parts, aliases),
    st.builds("from {} import *".format, modules),
    st.builds("from .{} import {}".format, parts, parts),
    st.builds("def f():\n    from {} import {} as {}\n    {}.{}()".format, modules, parts, aliases, aliases, parts),
)
uses = st.one_of(
    st.builds("{}.{}".format, aliases, parts),
    st.builds("{}.{}.{}(x)".format, aliases, parts, parts),
    st.builds("{} = {}".format, aliases, parts),
    st.builds("f({}).{}".format, parts, parts),
    st.builds("'{}'".format, modules),
)
programs = st.lists(st.one_of(imports, uses), max_size=8).map(lambda lines: "".join(f"{line}\n" for line in lines))


def needs_migration(found: PythonSource) -> bool:
    """Returns True if anything that LibCST finds in a file may have to be rewritten."""
    names = [place.name for place in (*found.imports, *found.uses)]
    return any(is_migrated(name) or name in ADVICE_FOR_CALLS for name in names) or any(
        is_migrated(module) or needs_torchs_groups(f"{module}.*") for _, module in found.stars
    )


def uses_torchs_group(found: PythonSource) -> bool:
    return any(group_user(place.name) is not None for place in (*found.imports, *found.uses))


@given(programs)
@example("from torch import distributed\n")
@example("import torch.nn.parallel\ntorch.distributed\n")
def test_no_file_that_concerns_the_migration_is_left_out(text):
    summary, found = summary_of(text), read_source(text)
    assert summary.needs_migration or not needs_migration(found)
    assert summary.needs_migration or summary.group_user is not None or not uses_torchs_group(found)
    assert sorted(imports_of(text)) == sorted(imported.name for imported in found.imports)


@pytest.mark.parametrize(
    "text", ["import os\n\nfrom timm import utils\n", "import os\nx = 1\nfrom timm import utils as u\nu.f()\n"]
)
def test_the_mode_is_the_same_without_parsing_in_full(text):
    summary = summary_of(text)
    assert not summary.needs_migration and summary.group_user == (3, "timm")
    in_full = choose_mode({"train.py": read_source(text)}, {})
    assert choose_mode({}, {"train.py": summary.group_user}) == in_full
    assert in_full.way is MigrationMode.PLUGIN and in_full.reason.startswith("train.py:3 uses timm, ")


@settings(max_examples=examples(30))
@given(programs)
@example("import torch as a\ndef f(a):\n    a.nn()\n")
@example("class C:\n    import torch as a\n    def f(self):\n        a.nn()\n")
@example("import torch\ndel torch\n")
@example("import torch as a\nmatch x:\n    case [*a]:\n        a.nn()\n")
def test_scopes_are_analyzed_wherever_they_matter(text):
    quick = read_source(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(python_source, "imports_are_unambiguous", lambda _: False)
        in_full = read_source(text)
    assert [(use.name, use.written, use.root, use.line) for use in quick.uses] == [
        (use.name, use.written, use.root, use.line) for use in in_full.uses
    ]


@pytest.mark.parametrize(
    "text",
    [
        "import torch as a\na.nn()\n",
        "import torch.nn\nimport torch.distributed\ntorch.nn()\n",
        "def f():\n    import torch as a\n    a.nn()\n",
    ],
)
def test_ordinary_imports_are_unambiguous(text):
    assert python_source.imports_are_unambiguous(text)


def test_what_this_python_cannot_parse_is_read_in_full():
    assert summary_of("import torch.distributed as dist\nmatch :=\n").needs_migration
    assert not summary_of("import torch\nprint 'no word of it'\n").needs_migration
