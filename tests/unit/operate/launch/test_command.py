"""Arguments of `paceline run`, and error messages about the script."""

from __future__ import annotations

import os

import pytest

from paceline.cli.main import main, parser
from paceline.operate.launch.workers.environment import allowed_cores


def test_arguments_after_the_script_are_the_scripts():
    options = parser().parse_args(["run", "--nproc_per_node", "3", "--standalone", "x.py", "--epochs", "2", "-m"])
    assert (options.nproc_per_node, options.script, options.args) == (3, "x.py", ["--epochs", "2", "-m"])
    assert parser().parse_args(["run", "--nproc-per-node", "auto", "x.py"]).nproc_per_node == allowed_cores()


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_number_of_workers_that_is_none_is_refused(number, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["run", f"--nproc-per-node={number}", "x.py"])
    assert "neither a number of at least 1 nor auto" in capsys.readouterr().err


def test_a_script_that_is_not_there_is_named(capsys):
    assert main(["run", "nowhere.py"]) == 2
    assert "nowhere.py does not exist; pass the path of a script" in capsys.readouterr().err


def test_a_script_that_one_worker_would_read_is_refused(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main(["run", str(tmp_path / "pipe")]) == 2
    said = capsys.readouterr().err
    assert "pipe is not a regular file, from which only one worker could read the script" in said


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["run", "--hosts", "a,b", "-"], "- is stdin, from which the other machines cannot read the script"),
        (["run", "-"], "- is stdin, from which no script can be read here; pass a file: - < SCRIPT"),
    ],
)
def test_a_script_that_cannot_be_read_from_stdin_is_refused(words, complaint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)  # as for a terminal
    assert main(words) == 2
    assert complaint in capsys.readouterr().err
