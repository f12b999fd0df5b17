"""The functions of `torch.nn.parallel.parallel_apply`, from `paceline.train.data_parallel`."""

from paceline.train.data_parallel import parallel_apply as parallel_apply
