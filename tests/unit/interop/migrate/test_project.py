"""Migration of all files in a program."""

from __future__ import annotations

import pytest

from paceline.interop.migrate import python_source
from paceline.interop.migrate.names import MigrationMode
from paceline.interop.migrate.project import migrate
from paceline.interop.migrate.python_source import read_source


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


OPTION = """import argparse
import torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("-b", "--dist-backend", DEFAULT, help="gloo or nccl")
parser.add_argument("--compiler-backend", default="gloo")
args = parser.parse_args()
dist.init_process_group(args.dist_backend)
"""
COMMANDS = """# torchrun train.py --dist-backend gloo
torchrun train.py --dist-backend gloo --compiler-backend gloo
torchrun train.py --dist-backend=gloo \\
    -b 'gloo'
python train.py --dist-backend \\
    gloo
python train.py --dist-backend gloo-like --dist-backend cpu:gloo,cuda:nccl --x-dist-backend gloo
"""
MIGRATED_COMMANDS = """# torchrun train.py --dist-backend gloo
paceline run train.py --dist-backend paceline --compiler-backend gloo
paceline run train.py --dist-backend=paceline \\
    -b 'paceline'
python train.py --dist-backend \\
    paceline
python train.py --dist-backend gloo-like --dist-backend cpu:gloo,cuda:nccl --x-dist-backend gloo
"""
LISTS = """args: ["--dist-backend", "gloo", "--compiler-backend", "gloo"]
command:
- --dist-backend
- gloo
"""


@pytest.mark.parametrize("default", ['default="gloo"', 'choices=["gloo", "nccl"]', "required=True"])
def test_commands_give_the_backend_that_the_script_expects(tmp_path, default):
    (tmp_path / "train.py").write_text(OPTION.replace("DEFAULT", default))
    (tmp_path / "go.sh").write_text(COMMANDS)
    (tmp_path / "job.yaml").write_text(LISTS)
    after = {file.path.name: file.after.text for file in migrate([tmp_path]).files}
    assert default.replace("gloo", "paceline") in after["train.py"]
    assert 'compiler-backend", default="gloo"' in after["train.py"]
    assert after["go.sh"] == MIGRATED_COMMANDS
    assert after["job.yaml"] == LISTS.replace("gloo", "paceline", 1).replace("- gloo", "- paceline")


def test_commands_keep_the_backend_of_other_scripts(tmp_path):
    (tmp_path / "train.py").write_text("import torch.distributed as dist\ndist.barrier()\n")
    (tmp_path / "go.sh").write_text("python train.py --backend gloo\n")
    assert [file.path.name for file in migrate([tmp_path]).files] == ["train.py"]
