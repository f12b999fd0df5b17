"""A replacement for Horovod: `horovod.torch` is `paceline.horovod`, and `horovod.run` is `paceline.horovod.run`.

May use: `paceline.horovod`. Start reading at `torch/__init__.py`.
"""

from paceline.interop.horovod.basics import run as run

__version__ = "0.28.1"  # the Horovod release whose interface is implemented
