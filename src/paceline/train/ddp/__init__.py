"""DistributedDataParallel: wraps a module so that backward averages its gradients over the ranks.

May use: `comm` and below, `checks`, `data`, and `logical_shards` for deterministic training. Start reading at
`distributed_data_parallel.py`, the public class, and then at `reducer.py`, whose Note follows a backward from forward
to the averaged gradients; `gradient_averager.py` makes the collectives.
"""
