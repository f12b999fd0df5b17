"""torch.distributed calls with all valid forms of arguments, for `tests/ranks/test_torch_calls.py`.

A case is a function of a module (`torch.distributed` or `paceline`), this rank and the number of ranks, which is 2. It
returns the results of the call: tensors, numbers, names.
"""

from __future__ import annotations

from torch_calls import collectives, groups, kinds_of_tensors, messages, stores_and_methods
from torch_calls.case import CASES, plain, sparse

__all__ = ["CASES", "collectives", "groups", "kinds_of_tensors", "messages", "plain", "sparse", "stores_and_methods"]
