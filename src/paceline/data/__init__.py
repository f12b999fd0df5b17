"""Samplers and loaders: which rank reads which sample.

May use: `group` and below. Start reading at `sampler.py`; what can be resumed is in `loader.py`, and `order.py` has the
rules both follow.
"""
