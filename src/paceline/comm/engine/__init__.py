"""Engines move and reduce a group's tensors: `native/` is Paceline's own; `gloo/`, `mpi/` and `nccl/` use libraries.

May use: `schedule` and below, and `_core`; an engine may not use another one. Start reading at `api.py` (what an engine
is), then `channel.py` (what it gives a group); `registry.py` lists the engines, `failures.py` writes the errors, and
`adapters/` has what an engine over a library need not write again.
"""
