"""Paceline behind the interfaces of other libraries, and the migration of programs from them.

May use: `operate`, `train` and `comm`. `torch_backend/` is a backend of `torch.distributed`, `horovod/` is Horovod's
interface, `integrations/` serves Lightning and Ray, and `migrate/` rewrites programs. Start reading at
`torch_backend/`.
"""
