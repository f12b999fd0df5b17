"""Checkpoints, which all ranks of a training loop save together and any number of ranks can load.

`captured_state.py` captures the objects in a state, and `shard_layout.py` maps the parts of a divided model to the
undivided model. `format/` implements the on-disk format without torch, `foreign/` reads checkpoints from other
libraries, and `peer_memory/` keeps checkpoints in the memory of launchers.

May use: `elastic` and below. Start reading at `manager.py`, which decides when to save, then read `save.py` and
`load.py`. For the format, start at `format/__init__.py`.
"""
