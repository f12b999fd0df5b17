"""Tensor parallelism: each rank in a group holds a part of each weight and computes the corresponding activations.

May use: `paceline.comm` and `train/module_tensors.py`. Start reading at `parallelize.py`, in which a style divides one
module, and `parallelize_module` applies styles to a model's modules by name. `layers.py` implements the divided layers
and the collectives between them; its `WeightSlice` describes the part of a weight that a rank holds.
"""
