"""Programs of torch.distributed for `bench/compat.py`, which know nothing of Paceline."""
