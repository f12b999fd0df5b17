"""Public name of `parallel_apply`, in the module that `torch.nn.parallel` has it in."""

from paceline.train.data_parallel import parallel_apply as parallel_apply
