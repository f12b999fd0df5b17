"""Public name of `replicate`, in the same module as in `torch.nn.parallel`."""

from paceline.train.data_parallel import replicate as replicate
