"""Tensor parallelism: each rank of a group holds a part of each weight, and computes that part of each activation.

May use: `paceline.comm`, `train/module_tensors.py`, and `train/zero` for clipping. Start reading at `parallelize.py`: a
style divides one module, and `parallelize_module` applies styles to a model by the names of its modules. `layers.py`
has the divided layers and the collectives between them, and `weight_slice.py` the part of a weight that a rank has.
"""
