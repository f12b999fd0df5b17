"""Samplers and loaders, which decide which rank reads which sample.

May use: `group` and below. Start reading at `sampler.py`; `loader.py` has the loader that can be resumed, and
`order.py` the rules that both follow.
"""
