"""The functions of `torch.nn.parallel.replicate`, from `paceline.train.data_parallel`."""

from paceline.train.data_parallel import replicate as replicate
