"""Checkpoints: what a training loop holds, so that a whole one is always there, and any number of ranks can read it.

May use: `elastic` and below. `format/` is what is on disk and how it gets there, without torch; `foreign/` reads what
other libraries wrote. Start reading at `format/__init__.py`.
"""
