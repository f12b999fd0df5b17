"""`--compat torch,horovod`: what workers find in their environment so that scripts of other libraries use Paceline.

It is all in variables, so that it also reaches what a script starts itself: subprocesses and the processes of mp.spawn.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "PACELINE_COMPAT"  # names the libraries; the plug-in reads it at the end of `import torch`
_LIBRARIES = ("torch", "horovod")
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # 0 would keep torch from calling the plug-in
_HOROVODS = {
    "HOROVOD_RANK": "RANK",
    "HOROVOD_SIZE": "WORLD_SIZE",
    "HOROVOD_LOCAL_RANK": "LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "HOROVOD_CROSS_RANK": "GROUP_RANK",
    "HOROVOD_CROSS_SIZE": "GROUP_WORLD_SIZE",
}
_STAND_IN = Path(__file__).parents[1] / "horovod" / "stand_in"  # holds a package `horovod`


def libraries(text: str) -> tuple[str, ...]:
    """`torch`, `horovod` or both, between commas."""
    chosen = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for name in chosen:
        if name not in _LIBRARIES:
            raise ArgumentTypeError(f"{name!r} is not a library that Paceline stands in for; it is torch or horovod")
    return chosen


def horovods_variables(of_torchrun: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables in which horovodrun tells a worker its ranks, from torchrun's."""
    return {name: of_torchrun[theirs] for name, theirs in _HOROVODS.items()}


def compat_variables(chosen: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for the chosen libraries, beside those that workers have anyway."""
    variables = {VARIABLE: ",".join(chosen)} if chosen else {}
    if "torch" in chosen:
        variables[_AUTOLOAD] = "1"
    if "horovod" in chosen:
        others = environment.get("PYTHONPATH", "")
        variables["PYTHONPATH"] = str(_STAND_IN) + (os.pathsep + others if others else "")
    return variables
