"""Checkpoints: what a training loop holds, so that a whole one is always there, and any number of ranks can read it.

`objects.py` says what each kind of object has in a checkpoint, `optimizers.py` what optimizers have, and `divided.py`
where the parts of a divided model are in the undivided one; `format/` is what is on disk and how it gets there,
without torch; `foreign/` reads what other libraries wrote; `copies/` is what launchers keep in memory.

May use: `elastic` and below. Start reading at `saving.py`, `loading.py` and, for what is on disk, `format/__init__.py`.
"""
