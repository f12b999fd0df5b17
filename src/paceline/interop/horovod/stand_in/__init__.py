"""Holds a package `horovod` that leads to Paceline, for scripts that import Horovod.

`paceline run --compat horovod` puts this folder on the path of its workers. May use: `paceline.interop.horovod`. Start reading
at `interop/horovod/__init__.py`.
"""
