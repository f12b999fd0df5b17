"""Programs of torch.distributed for `bench/compat.py`, which do not import Paceline."""
