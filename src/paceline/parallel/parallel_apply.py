"""Public name of `parallel_apply`, in the same module as in `torch.nn.parallel`."""

from paceline.train.data_parallel import parallel_apply as parallel_apply
