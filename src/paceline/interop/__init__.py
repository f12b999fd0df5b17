"""Interfaces that make Paceline usable through other libraries, and a tool that migrates programs to Paceline.

`torch_backend/` is a backend for `torch.distributed`, `horovod/` implements Horovod's interface, `integrations/`
supports Lightning and Ray, and `migrate/` rewrites programs. This module imports nothing, because every `import torch`
loads it.

May use: `operate`, `train` and `comm`. Start reading at `torch_backend/`.
"""
