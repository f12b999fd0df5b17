"""Keeps calls that move data between ranks out of compiled graphs.

torch.compile would otherwise trace into the call, down to the functions of the core, which it cannot trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from torch._C._dynamo.eval_frame import set_eval_frame
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling

_P = ParamSpec("_P")
_T = TypeVar("_T")


def eager(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns `call` wrapped so that torch.compile breaks its graph around it; with fullgraph=True it raises."""

    @functools.wraps(call)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if is_dynamo_compiling():
            return outside(call, *args, **kwargs)
        # torch.compile skips a frame without tensors, but would still compile the functions that the frame calls.
        compiler = set_eval_frame(None)
        try:
            return call(*args, **kwargs)
        finally:
            if compiler is not None:
                set_eval_frame(compiler)

    return called


def outside(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Calls `call` where torch.compile does not see it.

    `if is_dynamo_compiling(): return outside(...)` at the head of a function that takes tensors does what `eager` does,
    without the half microsecond of a decorator.
    """
    return cast(_T, _hidden(call, *args, **kwargs))


@_disable_dynamo  # torch.compiler.disable would import torch._dynamo here, which takes more than a second
def _hidden(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)
