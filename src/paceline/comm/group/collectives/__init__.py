"""Public collectives and messages for tensors and Python objects.

May use: `group` and the layers below it, which do not use this folder. Start reading at `collectives.py`, whose
docstring lists the rules for all calls. `point_to_point.py` implements messages, `persistent.py` implements persistent
calls, and `object_collectives.py` implements calls on Python objects, which it encodes with `object_codec.py`.
"""
