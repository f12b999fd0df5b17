"""Paceline behind the interfaces of other libraries, and the migration of programs from them.

`torch_backend/` is a backend of `torch.distributed`, `horovod/` is Horovod's interface, `integrations/` serves
Lightning and Ray, and `migrate/` rewrites programs. This module imports nothing, because it is loaded at the end of
`import torch`.

May use: `operate`, `train` and `comm`. Start reading at `torch_backend/`.
"""
