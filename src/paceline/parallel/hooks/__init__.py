"""Communication hooks for `DistributedDataParallel.register_comm_hook`.

`average.py` sends gradients as they are or in half precision, `int8.py` as 8-bit integers, `power_sgd.py` as factors of
low rank. May use: `parallel/ddp` and `group`. Start reading at `average.py`. All divide by the number of ranks, and all
leave the same bits on every rank.
"""

from paceline.parallel.ddp.futures import DeferredFuture, collect_all, future_of
from paceline.parallel.ddp.hook import GradBucket
from paceline.parallel.hooks.average import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from paceline.parallel.hooks.int8 import Int8State, int8_hook
from paceline.parallel.hooks.power_sgd import PowerSGDState, power_sgd_hook

powerSGD_hook = power_sgd_hook

__all__ = [
    "DeferredFuture",
    "GradBucket",
    "Int8State",
    "PowerSGDState",
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "collect_all",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "future_of",
    "int8_hook",
    "powerSGD_hook",
    "power_sgd_hook",
]
