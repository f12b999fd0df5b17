"""Training on several ranks: data parallelism, models that are divided, data, checkpoints, and elastic jobs.

May use: `comm` and below. Start reading at `ddp/distributed_data_parallel.py`. The files of this folder itself serve
several of its packages: `preconditions.py` checks a module before it is wrapped, `module_tensors.py` has the tensors
that are averaged and copied, `autograd_graph.py` looks at autograd's graph. `zero/` and `shared_model/` divide the
state of optimizers, `tensor/` and `pipeline/` divide models that do not fit on one device, `diloco/` averages only now
and then, and `logical_shards/` computes the same bits on any number of ranks.
"""
