"""ZeRO: each rank holds a part of the optimizer's state, the gradients and the parameters (Rajbhandari et al. 2020).

May use: `group` and below, and the other modules of `parallel`. Start reading at `optimizer.py`; which rank has what is
decided in `partition.py`, gradients travel in `gradients.py`, parameters in `parameters.py`.
"""
