"""DistributedDataParallel: wraps a module so that backward averages its gradients over the ranks.

May use: `comm` and below, and the other packages of `train`. Start reading at `reducer.py`, whose Note follows a
backward from forward to the averaged gradients; `gradient_averager.py` makes the calls, and
`distributed_data_parallel.py` has the public class.
"""
