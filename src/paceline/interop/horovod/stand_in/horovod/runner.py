"""`run`, which runs a function in several processes, as in `horovod.runner`."""

from paceline.interop.horovod.basics import run

__all__ = ["run"]
