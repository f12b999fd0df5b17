"""Tensor parallelism: each rank in a group holds a part of each weight and computes the corresponding activations.

May use: `paceline.comm`, `train/module_tensors.py`, and `train/zero` for clipping. Start reading at `parallelize.py`: a
style divides one module, and `parallelize_module` applies styles to a model's modules by name. `layers.py` implements
the divided layers and the collectives between them. `weight_slice.py` describes the part of a weight that a rank holds.
"""
