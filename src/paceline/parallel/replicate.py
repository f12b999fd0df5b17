"""Public name of `replicate`, in the module that `torch.nn.parallel` has it in."""

from paceline.train.data_parallel import replicate as replicate
