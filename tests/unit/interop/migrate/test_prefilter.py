"""Files without code to migrate are skipped without being parsed, and no other file is."""

from __future__ import annotations

import test_python_files
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.interop.migrate import python_source
from paceline.interop.migrate.call_rules import advice_for_call
from paceline.interop.migrate.names import MigrationMode, group_user, is_migrated, needs_torchs_groups
from paceline.interop.migrate.project import migrate
from paceline.interop.migrate.python_files import imports_of, may_need_migration
from paceline.interop.migrate.python_source import read_source

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


def is_concerned(text: str) -> bool:
    """Returns True if anything that LibCST finds in a file is relevant to the migration."""
    found = read_source(text)
    names = [each.name for each in (*found.imports, *found.uses)]
    return any(is_migrated(each) or advice_for_call(each) or group_user(each) for each in names) or any(
        is_migrated(module) or needs_torchs_groups(f"{module}.*") for _, module in found.stars
    )


@given(st.lists(st.one_of(imports, uses), max_size=8).map(lambda lines: "".join(f"{line}\n" for line in lines)))
@example("from torch import distributed\n")
@example("import torch.nn.parallel\ntorch.distributed\n")
def test_no_file_that_concerns_the_migration_is_left_out(text):
    assert may_need_migration(text) or not is_concerned(text)
    assert sorted(imports_of(text)) == sorted(each.name for each in read_source(text).imports)


def test_no_program_of_the_other_tests_is_left_out():
    for before, after in test_python_files.IMPORTS.values():
        assert may_need_migration(before) or after is None or before == after


def test_what_this_python_cannot_parse_is_read_in_full():
    assert may_need_migration("import torch.distributed as dist\nmatch :=\n")
    assert not may_need_migration("import torch\nprint 'no word of it'\n")


def test_only_files_of_concern_are_read_in_full(tmp_path, monkeypatch):
    texts: list[str] = []

    def counting(text: str) -> python_source.PythonSource:
        texts.append(text)
        return read_source(text)

    monkeypatch.setattr(python_source, "read_source", counting)
    program = "import torch.distributed as dist\ndist.barrier()\n"
    (tmp_path / "program.py").write_text(program)
    for number in range(20):
        model = (
            f'"""No distributed training here."""\nimport torch\nfrom torch import nn\nlayer = nn.Linear({number}, 1)\n'
        )
        (tmp_path / f"model_{number}.py").write_text(model)
    migrated = migrate([tmp_path])
    assert texts == [program]
    assert [file.path.name for file in migrated.files] == ["program.py"]
    assert migrated.files[0].after.text == "import paceline as dist\ndist.barrier()\n"


def test_a_module_beside_an_unconcerned_importer_counts(tmp_path):
    (tmp_path / "train.py").write_text("import torch\nimport helper\nhelper.start()\n")
    (tmp_path / "main.py").write_text("import torch.distributed as dist\ndist.barrier()\n")
    (tmp_path / "helper.py").write_text("import torch.distributed\n")
    migrated = migrate([tmp_path / "train.py", tmp_path / "main.py"])
    assert migrated.choice.way is MigrationMode.PLUGIN
    assert f"{tmp_path / 'helper.py'} mentions torch.distributed" in migrated.choice.reason
