"""Training on several ranks: data parallelism, models divided among ranks, data loading, checkpoints, and elastic jobs.

May use: `comm` and below. Start reading at `ddp/distributed_data_parallel.py`. The files directly in this folder are
shared by several packages: `preconditions.py` checks a module before it is wrapped, `module_tensors.py` collects the
tensors that are averaged and copied, and `autograd_graph.py` inspects autograd's graph. `zero/` and `shared_model/`
divide the state of optimizers, `tensor/` and `pipeline/` divide models that do not fit on one device, `diloco/`
averages only once in many steps, and `logical_shards/` makes results bitwise equal for different numbers of ranks.
"""
