"""Public names of `scatter` and `gather`, in the same module as in `torch.nn.parallel`."""

from paceline.train.data_parallel import gather as gather
from paceline.train.data_parallel import scatter as scatter
from paceline.train.data_parallel import scatter_arguments as scatter_arguments
