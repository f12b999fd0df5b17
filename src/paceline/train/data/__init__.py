"""Samplers and loaders, which decide which rank reads which sample.

May use: `group` and below. Start reading at `sampler.py`; `loader.py` has the loader that can be resumed, `indexed.py`
and `stream.py` what it does for datasets with an index and for streams, and `order.py` the rules that all follow.
"""
