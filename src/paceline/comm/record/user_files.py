"""Tells the user's source files from those of Python, installed packages and Paceline.

Messages name lines in the user's files. Both the recorder of a process, which records the line of each call, and the
launcher, which reads the stacks of other processes, follow this rule.
"""

from __future__ import annotations

import os
import re
import sys

_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 2)) + os.sep
_INSTALLED = re.compile(r"/site-packages/|/dist-packages/|/lib(?:64)?/python3(?:\.\d+)?/|/lib/python3\d+\.zip/")
_OWN_START = ("paceline/operate/launch/workers/bootstrap.py", "paceline/operate/launch/workers/template.py", "runpy.py")


def is_users(file: str) -> bool:
    """Returns whether a source file belongs to the user."""
    return not (file.startswith(("<", _PACKAGE)) or file.endswith(_OWN_START) or _INSTALLED.search(file))


def name_if_users(file: str) -> str | None:
    """Returns the name of a file for messages, such as `train.py`, or None if the file does not belong to the user.

    In this process, PyTorch is also recognized in a directory with another name (`pip install --target`).
    """
    torch = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or "")
    return os.path.basename(file) if is_users(file) and not (torch and file.startswith(torch + os.sep)) else None
