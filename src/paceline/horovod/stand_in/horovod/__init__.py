"""Stands in for Horovod: `horovod.torch` is `paceline.horovod`, and `horovod.run` its `run`.

May use: `paceline.horovod`. Start reading at `torch.py`, which puts it in place.
"""

from paceline.horovod.running import run as run

__version__ = "0.28.1"  # the release whose interface it has
