"""Engines, which move and reduce tensors: Paceline's own engine in `native/`, and engines that wrap libraries.

May use: `schedule`, the layers below it, and `_core`; an engine must not use another engine. Start reading at `api.py`
(the interface and the list of engines), then `channel.py` (the interface of a group's channel); `failures.py` builds
errors, and `adapters/` contains the parts shared by engines that wrap a library.
"""
