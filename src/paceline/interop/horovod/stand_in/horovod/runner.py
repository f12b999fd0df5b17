"""The function `run`, which calls a function on several processes, as in `horovod.runner`."""

from paceline.interop.horovod.basics import run

__all__ = ["run"]
