"""DistributedDataParallel: wraps a module so that backward averages its gradients over the ranks.

May use: `comm` and below, `checks`, `data`, and `logical_shards` for deterministic training. Start reading at
`distributed_data_parallel.py`, which contains the public class, and continue with the Note in `reducer.py`, which
describes the path from forward to averaged gradients. `bucket_assignment.py` divides the parameters into buckets, and
`gradient_averager.py` calls the collectives.
"""
