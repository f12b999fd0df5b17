"""DistributedDataParallel: wraps a module so that backward averages its gradients over the ranks.

May use: `group` and below, and what is in `parallel` itself. Start reading at `reducer.py`, whose Note follows a
backward from forward to the averaged gradients; `module.py` is the public class.
"""
