"""The user's files are distinguished from those of Python, installed packages and Paceline."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import paceline
from paceline import errors


def test_all_of_paceline_counts_as_installed():
    package = os.path.join(os.path.dirname(os.path.abspath(paceline.__file__)), "")
    assert package == errors._PACKAGE
    ours = [str(path) for path in Path(package).glob("**/*.py")]
    assert len(ours) > 300
    assert not [file for file in ours if errors.is_user_file(file)]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("/home/me/train.py", "train.py"),
        ("/usr/src/app/train.py", "train.py"),
        ("/home/me/torch/train.py", "train.py"),
        ("/home/me/lib/python3_tools/train.py", "train.py"),
        ("/usr/lib/python3.11/threading.py", None),
        ("/usr/lib/python311.zip/threading.py", None),
        ("/usr/lib64/python3/dist-packages/numpy/linalg.py", None),
        ("/home/me/venv/lib/python3.12/site-packages/lightning/trainer.py", None),
        ("<string>", None),
        (torch.__file__, None),
    ],
)
def test_only_the_users_files_have_names(file, name):
    assert errors.user_file_name(file) == name


def test_a_file_name_that_is_not_utf8_is_escaped():
    assert errors.user_file_name("/home/a\udcff/train\udce9.py") == "train\\udce9.py"
