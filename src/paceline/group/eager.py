"""Keeps calls that move data between ranks out of compiled graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch._compile import _disable_dynamo

_P = ParamSpec("_P")
_T = TypeVar("_T")


def eager(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """`call`, before and after which torch.compile breaks its graph; with fullgraph=True it says so."""

    @functools.wraps(call)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling():
            return cast(_T, _outside(call, *args, **kwargs))
        return call(*args, **kwargs)

    return called


@_disable_dynamo  # torch.compiler.disable would import torch._dynamo here, which takes more than a second
def _outside(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)
