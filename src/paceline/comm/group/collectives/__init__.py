"""Collectives and messages of Python objects, without pickle unless both sides allow it.

May use: the collectives of `group`. Start reading at `collectives.py`; `wire.py` has the format, `codec.py` the types.
"""
