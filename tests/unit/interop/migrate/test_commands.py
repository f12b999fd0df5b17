"""`paceline migrate` on shell scripts, Slurm files, YAML and Dockerfiles, and the command's output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paceline.cli.main import main
from paceline.interop.migrate.commands import migrate_commands
from paceline.interop.migrate.names import MARK

COMMANDS = {  # by feature: before and after (None if unchanged)
    "torchrun": ("torchrun --nproc_per_node=4 train.py --lr 1\n", "paceline run --nproc_per_node=4 train.py --lr 1\n"),
    "a script alone": ("torchrun train.py\n", "paceline run train.py\n"),
    "its path": ("/opt/venv/bin/torchrun --standalone t.py\n", "paceline run --standalone t.py\n"),
    "behind variables": ("OMP_NUM_THREADS=1 torchrun $ARGS t.py\n", "OMP_NUM_THREADS=1 paceline run $ARGS t.py\n"),
    "under srun": ("srun torchrun \\\n  --nnodes 1 \\\n  t.py\n", "srun paceline run \\\n  --nnodes 1 \\\n  t.py\n"),
    "in a string": ("bash -c 'torchrun --standalone t.py'\n", "bash -c 'paceline run --standalone t.py'\n"),
    "the module": ("python3 -u -m torch.distributed.run t.py\n", "python3 -u -m paceline run t.py\n"),
    "the older module": (
        "python -m torch.distributed.launch --use_env t.py\n",
        "python -m paceline.launch --use_env t.py\n",
    ),
    "which": ("python $(which torchrun) t.py\n", "python $(which paceline) run t.py\n"),
    "horovodrun": ("horovodrun -np 4 python train.py --lr 1\n", "paceline run --nproc-per-node 4 train.py --lr 1\n"),
    "horovodrun on localhost": (
        "horovodrun --gloo -np 2 -H localhost:2 python3 -u t.py\n",
        "paceline run --nproc-per-node 2 t.py\n",
    ),
    "a comment": ("# torchrun --standalone t.py\n", None),
    "a comment behind a command": ("ls # torchrun --standalone t.py\n", None),
    "what is printed": ('echo "torchrun --standalone t.py"\n', None),
    "a question": ("which torchrun || exit 1\n", None),
    "a name": ("name: torchrun job.py\n", None),
    "another program": ("mytorchrun --a t.py; torchrun-x --b t.py\n", None),
    "an import": ("from torch.distributed.run import main\n", None),
    "a list": ('CMD ["torchrun", "--standalone", "t.py"]\n', 'CMD ["paceline", "run", "--standalone", "t.py"]\n'),
    "a list with a module": (
        '["python", "-m", "torch.distributed.run", "t.py"]\n',
        '["python", "-m", "paceline", "run", "t.py"]\n',
    ),
    "a list in lines": (
        "command:\n  - torchrun\n  - --nproc_per_node=1\n",
        "command:\n  - paceline\n  - run\n  - --nproc_per_node=1\n",
    ),
    "a module in lines": (
        "  - python\n  - -m\n  - torch.distributed.run\n  - t.py\n",
        "  - python\n  - -m\n  - paceline\n  - run\n  - t.py\n",
    ),
    "the older module in lines": (
        "  - -m\n  - torch.distributed.launch\n",
        "  - -m\n  - paceline.launch\n",
    ),
    "a Dockerfile": ("ENTRYPOINT torchrun --standalone t.py\n", "ENTRYPOINT paceline run --standalone t.py\n"),
    "several machines of Slurm": (
        "#SBATCH -N 2\nsrun torchrun --nnodes 2 t.py\n",
        "#SBATCH -N 2\nsrun paceline run --nnodes 2 t.py\n",
    ),
}
LEFT = {  # by feature: the command, and words in the reason
    "several machines": ("torchrun --nnodes=2 --rdzv_endpoint=h:1 t.py\n", "PACELINE_SECRET"),
    "as many machines as a variable says": ("torchrun \\\n  --nnodes $N t.py\n", "PACELINE_SECRET"),
    "etcd": ("torchrun --rdzv_backend=etcd --nnodes=1 t.py\n", "c10d"),
    "machines of horovodrun": ("horovodrun -np 8 -H a:4,b:4 python t.py\n", "--nnodes"),
    "accelerate": ("accelerate launch --cpu t.py\n", "decides about the backend"),
    "deepspeed": ("deepspeed t.py --deepspeed_config c.json\n", "DeepSpeed"),
}
POD = """\
spec:
  containers:
  - name: trainer
    command:
    - torchrun
    - --nnodes=2
    - --rdzv_endpoint=master:29400
    - train.py
    args: >
      one
      two
  - name: other
    command: ["bash", "-c"]
    args:
    - >-
      echo started;
      torchrun --nnodes=2
      train.py
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_start_paceline(name):
    before, after = COMMANDS[name]
    done = migrate_commands(before)
    assert done.text == (before if after is None else after)
    assert len(done.places) == (after is not None)
    assert migrate_commands(done.text).text == done.text


@pytest.mark.parametrize("name", LEFT)
def test_commands_that_need_more_say_why(name):
    before, words = LEFT[name]
    done = migrate_commands(before)
    assert [place.is_migrated_fully for place in done.places] == [False]
    assert words in done.places[0].reason
    assert done.text.startswith(f"# {MARK}")
    assert migrate_commands(done.text).text.count(MARK) == 1


def test_a_comment_does_not_cut_a_command_in_two():
    done = migrate_commands("set -e\nexport A=1 && \\\ntorchrun --nnodes 2 \\\n  t.py\n")
    lines = done.text.splitlines()
    assert lines[0] == "set -e"
    assert lines[1].startswith(f"# {MARK}")
    assert done.text.endswith("export A=1 && \\\npaceline run --nnodes 2 \\\n  t.py\n")


def test_yaml_keeps_its_structure():
    done = migrate_commands(POD)
    before, after = yaml.safe_load(POD), yaml.safe_load(done.text)
    first, second = after["spec"]["containers"]
    assert first["command"] == ["paceline", "run", *before["spec"]["containers"][0]["command"][1:]]
    assert first["args"] == "one two\n"
    assert second["args"] == ["echo started; paceline run --nnodes=2 train.py"]
    assert done.text.count(MARK) == 2


def program(directory: Path) -> Path:
    (directory / "train.py").write_text('import torch.distributed as dist\ndist.init_process_group("gloo")\n')
    (directory / "run.sh").write_text("torchrun --standalone train.py\ndeepspeed other.py\n")
    (directory / "broken.py").write_text("import torch.distributed as\n")
    (directory / "notes.txt").write_text("torchrun --standalone train.py\n")
    (directory / ".hidden").mkdir()
    (directory / ".hidden" / "x.sh").write_text("torchrun --standalone train.py\n")
    return directory


def test_the_command_prints_a_patch_and_a_score(tmp_path, capsys):
    folder = program(tmp_path)
    before = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert main(["migrate", str(folder)]) == 0
    assert {path: path.read_text() for path in before} == before
    printed = capsys.readouterr()
    assert "+import paceline as dist\n" in printed.out
    assert "3 of 4 locations were migrated." in printed.err
    assert "broken.py: left unchanged" in printed.err
    assert "line 2, deepspeed: to do: " in printed.err


def test_the_command_writes_when_it_is_told_to(tmp_path, capsys):
    folder = program(tmp_path)
    assert main(["migrate", "--write", str(folder)]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "2 files changed." in printed.err
    assert (folder / "run.sh").read_text().startswith("paceline run --standalone train.py\n# TODO(paceline): ")
    assert (folder / "notes.txt").read_text().startswith("torchrun")
    assert main(["migrate", "--write", str(folder)]) == 0
    assert "0 files changed." in capsys.readouterr().err


def test_a_program_comes_over_as_a_whole(tmp_path, capsys):
    folder = program(tmp_path)
    (folder / "model.py").write_text("from torch.distributed.fsdp import fully_shard\n")
    assert main(["migrate", "--write", str(folder)]) == 0
    assert "model.py:1 uses torch.distributed.fsdp.fully_shard" in capsys.readouterr().err
    assert (
        folder / "train.py"
    ).read_text() == 'import torch.distributed as dist\ndist.init_process_group("paceline")\n'


def test_a_module_beside_a_lone_file_counts(tmp_path, capsys):
    (tmp_path / "train.py").write_text("import torch.distributed as dist\nimport helper\ndist.get_rank()\n")
    (tmp_path / "helper.py").write_text("import torch.distributed\n")
    assert main(["migrate", str(tmp_path / "train.py")]) == 0
    assert "helper.py mentions torch.distributed" in capsys.readouterr().err


def test_a_missing_path_is_said(tmp_path, capsys):
    assert main(["migrate", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_without_libcst_the_extra_is_named(tmp_path):
    code = "import sys; sys.modules['libcst'] = None; from paceline.cli.main import main; sys.exit(main(sys.argv[1:]))"
    folder = program(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code, "migrate", str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "pip install 'paceline[migrate]'" in done.stderr
