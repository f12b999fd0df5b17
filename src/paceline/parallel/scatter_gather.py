"""The functions of `torch.nn.parallel.scatter_gather`, from `paceline.train.data_parallel`."""

from paceline.train.data_parallel import gather as gather
from paceline.train.data_parallel import scatter as scatter
from paceline.train.data_parallel import scatter_arguments as scatter_arguments
