"""The directory of the replacement package `horovod`, for scripts that import Horovod.

`paceline run --compat horovod` adds the directory to the import path of its workers.

May use: `paceline.horovod`. Start reading at `interop/horovod/__init__.py`.
"""
