"""Training on several ranks: data parallelism, models divided among ranks, data loading, checkpoints, and elastic jobs.

May use: `comm` and below. Start reading at `ddp/distributed_data_parallel.py`. Several packages share the files in this
folder: `preconditions.py` checks a module before it is wrapped, `module_tensors.py` collects the tensors that are
averaged and copied, and `autograd_graph.py` inspects the autograd graph. `zero/` and `shared_model/` shard optimizer
state, `tensor/` and `pipeline/` divide models that do not fit on one device, `diloco/` averages parameters only every
few steps, and `logical_shards/` produces bitwise equal results on different numbers of ranks.
"""
