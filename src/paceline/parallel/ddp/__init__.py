"""DistributedDataParallel: wraps a module so that backward averages its gradients over the ranks.

May use: `group`. Start reading at `module.py`; `reducer.py` starts the reductions.
"""
