"""ZeRO: each rank holds a part of the optimizer's state, the gradients and the parameters (Rajbhandari et al. 2020).

May use: `paceline.comm`, `train.ddp`, `train.checks` and the modules directly in `train`. Start reading at
`zero_redundancy_optimizer.py`. `shards.py` assigns parameters to ranks, `gradient_reducer.py` averages gradients, and
`sharded_parameters.py` gathers and frees parameters.
"""
