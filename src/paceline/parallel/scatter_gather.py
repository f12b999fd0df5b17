"""Public names of `scatter` and `gather`, in the module that `torch.nn.parallel` has them in."""

from paceline.train.data_parallel import gather as gather
from paceline.train.data_parallel import scatter as scatter
from paceline.train.data_parallel import scatter_arguments as scatter_arguments
