"""Stands in for Horovod: `horovod.torch` has what `paceline.horovod` has, and `horovod.run` is its `run`.

May use: `paceline.horovod`. Start reading at `torch/__init__.py`.
"""

from paceline.horovod.running import run as run

__version__ = "0.28.1"  # the release whose interface it has
