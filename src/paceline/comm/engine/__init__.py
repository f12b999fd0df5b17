"""Engines, which move and reduce tensors: Paceline's own engine in `native/`, and engines that wrap libraries.

May use: `schedule` and below, and `_core`; an engine may not use another engine. Start reading at `api.py` (the
interface of an engine), then `channel.py` (the interface of a group's channel); `registry.py` lists the engines,
`failures.py` builds errors, and `adapters/` contains the parts shared by engines that wrap a library.
"""
