"""The public collectives and messages, for tensors and for Python objects.

May use: `group` and below, which use nothing of this folder. Start reading at `collectives.py`, whose docstring has the
rules for all calls. `point_to_point.py` has the messages, `persistent.py` the calls that are prepared once, and
`object_collectives.py` the calls on Python objects, in the format of `object_codec.py`.
"""
