"""Public names of `paceline.interop.integrations`: Paceline for Lightning and for Ray.

May use: `interop`. Start reading at `lightning.py` and `ray.py` there.
"""
