"""Reads the text of a stack that faulthandler wrote, and finds the user's line in it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import PurePath

from paceline.observe.evidence import Frame, Place

_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?+) in (.*)$')
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PACKAGES = ("/site-packages/", "/dist-packages/")
_STANDARD = re.compile(r"/lib(?:64)?/python3(?:\.\d+)?/|/lib/python3\d+\.zip/")
_OWN_START = ("paceline/launch/bootstrap.py", "paceline/launch/template.py", "runpy.py")
_LOADERS = (
    "torch/utils/data/",
    "paceline/data/",
    "paceline/parallel/sharded/loader.py",
    "paceline/parallel/sharded/streams.py",
)
_CALLS = (
    "paceline/group/",
    "paceline/engine/",
    "paceline/functional/",
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
_THREAD_WAITS = ("/threading.py", "/concurrent/futures/_base.py", "/queue.py")
_LAST_FUNCTIONS = ("<module>", "_bootstrap")


def parse(text: str) -> tuple[Frame, ...]:
    """Returns the frames of the first stack in `text`, the innermost one first."""
    frames: list[Frame] = []
    for line in text.splitlines():
        found = _FRAME.match(line)
        if found is not None:
            frames.append(Frame(found[1], int(found[2]) if found[2].isdecimal() else 0, found[3]))
        elif frames:
            break
    return tuple(frames)


def is_whole(text: str) -> bool:
    """Returns whether the text ends as that of a whole stack does: at the thread's first function, or cut at 100."""
    last = text.rstrip("\n").rpartition("\n")[2]
    return text.endswith("\n") and (last.endswith(tuple(f" in {name}" for name in _LAST_FUNCTIONS)) or last == "  ...")


def is_in_a_thread(frames: Sequence[Frame]) -> bool:
    """Returns whether this thread only waits for another one, which therefore says more."""
    return bool(frames) and frames[0].file.endswith(_THREAD_WAITS)


def place_of(frames: Sequence[Frame]) -> Place | None:
    """Returns where a program with this stack is, in the user's terms; None if the stack is empty."""
    if not frames:
        return None
    at = next((at for at, frame in enumerate(frames) if _is_users(frame)), None)
    is_call = any(_is_in(frame, _CALLS) for frame in frames[:at])
    loader = next((frame for frame in reversed(frames[:at]) if _is_in(frame, _LOADERS)), None)
    if at is None:
        return Place(_called(frames[-1]), is_loader=loader is not None, is_call=is_call)
    user = frames[at]
    line = f"{PurePath(user.file).name}:{user.line}"
    is_data = loader is not None or any(_is_in(frame, _LOADERS) for frame in frames[at:])
    if loader is not None:
        what = _loader(loader)
    elif at > 0:
        what = _called(frames[at - 1])
    else:
        what = "" if user.function == "<module>" else user.function
    return Place(what, line, is_loader=is_data, is_call=is_call)


def _is_users(frame: Frame) -> bool:
    """Returns whether a frame belongs to the user, and not to Python, an installed package or Paceline."""
    file = frame.file
    if file.startswith(("<", _PACKAGE)) or file.endswith(_OWN_START):
        return False
    return not any(part in file for part in _PACKAGES) and not _STANDARD.search(file)


def _is_in(frame: Frame, parts: Sequence[str]) -> bool:
    return any(part in frame.file for part in parts)


def _loader(frame: Frame) -> str:
    kind = "DataLoader" if "torch/utils/data" in frame.file else "StatefulLoader"
    return f"{kind}.{frame.function}"


def _called(frame: Frame) -> str:
    """Names a library's function: by its module, since its class is not known."""
    module = PurePath(frame.file).stem
    module = PurePath(frame.file).parent.name if module == "__init__" else module
    return f"{module}.{frame.function}"
