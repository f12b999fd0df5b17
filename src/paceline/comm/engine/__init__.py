"""Engines, which move and reduce the tensors of groups: Paceline's own in `native/`, and others that wrap libraries.

May use: `schedule` and below, and `_core`; an engine may not use another one. Start reading at `api.py` (the interface
of an engine), then `channel.py` (the interface of a group's channel); `registry.py` lists the engines, `failures.py`
builds the errors, and `adapters/` has the parts shared by the engines that wrap a library.
"""
