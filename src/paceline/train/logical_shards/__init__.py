"""Training whose result is bitwise equal on any number of ranks.

May use: `comm` and below, and `checks`. Start reading at `logical_shards.py`. `tree_sum.py`
defines the order of summation, and `shard_batches.py` assigns samples and random numbers to shards.
"""
