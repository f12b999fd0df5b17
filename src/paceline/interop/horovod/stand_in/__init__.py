"""The directory of a package `horovod` over Paceline, for scripts that import Horovod.

`paceline run --compat horovod` puts it on the path of its workers.

May use: `paceline.horovod`. Start reading at `interop/horovod/__init__.py`.
"""
