"""Training whose result is bitwise equal on any number of ranks.

May use: `comm` and below, and the other packages of `train`. Start reading at `logical_shards.py`; `tree_sum.py` has
the order of summation, and `shard_batches.py` the samples and random numbers of each shard.
"""
