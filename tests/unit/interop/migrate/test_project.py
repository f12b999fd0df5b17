"""Migration of all files of a program."""

from __future__ import annotations

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
