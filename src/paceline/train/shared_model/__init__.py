"""One copy of a model per host: a host's ranks share the parameters' memory, and each updates a part of them.

May use: `paceline.comm`, `train.zero`, `train.ddp`, `train.checks` and modules directly in `train`. Start reading at
`shared_model_optimizer.py`; `shared_shards.py` assigns slices to ranks, `shared_parameters.py` manages the shared
memory, and `gradient_exchange.py` averages gradients.
"""
