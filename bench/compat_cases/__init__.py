"""Programs for `bench/compat.py` that use torch.distributed and do not import Paceline."""
