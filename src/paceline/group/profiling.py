"""Calls as `torch.profiler` shows them: `paceline:all_reduce` with the shapes of its tensors, from the call to its end.

Whoever makes a call looks at `torch.autograd.profiler._is_profiler_enabled` first: it costs nanoseconds, and PyTorch's
own Python looks at it for the same purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_autograd: Any = torch.autograd  # its stubs do not list what is used here


class Recording:
    """One call in the profile, from the making of this object to `end`, which any thread may call."""

    def __init__(self, call: str, tensors: Sequence[torch.Tensor]) -> None:
        self._record = _autograd._record_function_with_args_enter(f"paceline:{call}", *tensors)

    def end(self) -> None:
        """The call is over."""
        _autograd._record_function_with_args_exit(self._record)
