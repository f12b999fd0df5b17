"""One copy of a model for all ranks of a host: they share the memory of its parameters, and each updates a part of it.

May use: `group` and below, and the other modules of `parallel`. Start reading at `optimizer.py`; `slices.py` decides
which rank updates what, `parameters.py` holds the shared memory, and gradients travel in `exchange.py`.
"""
