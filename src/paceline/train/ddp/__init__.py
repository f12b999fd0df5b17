"""DistributedDataParallel: wraps a module so that backward averages its gradients over the ranks.

May use: `group` and below, and what is in `parallel` itself. Start reading at `backward_state.py`, whose Note
follows a backward from forward to the averaged gradients; `reducer.py` runs it, and `module.py` is the public class.
"""
