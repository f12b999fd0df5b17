"""One copy of a model per host: the host's ranks share the memory of its parameters, and each updates a part.

May use: `paceline.comm`, `train.zero`, `train.ddp`, `train.checks` and the modules of `train`. Start reading at
`shared_model_optimizer.py`; `shared_shards.py` assigns slices to ranks, `shared_parameters.py` manages the shared
memory, and `gradient_exchange.py` averages gradients.
"""
