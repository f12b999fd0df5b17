"""Tensor parallelism: each rank of a group holds a part of each weight, and computes that part of each activation.

May use: `group` and below. Start reading at `styles.py`: a style says how one module is divided, and
`parallelize.py` applies styles to a model by the names of its modules. `layers.py` has the divided layers, `flow.py`
the collectives between them as functions of autograd, and `slices.py` says which part of a weight a rank has.
"""
