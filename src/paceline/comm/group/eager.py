"""Decorators that keep communication calls out of compiled graphs.

Without these decorators, torch.compile would trace into communication calls, down to core functions that it cannot
trace. It would also compile functions that PyTorch calls back while compiled code runs, such as hooks and the methods
of a backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

from torch._C._dynamo import eval_frame
from torch._C._dynamo.eval_frame import set_eval_frame as set_eval_frame

Compiler: TypeAlias = Any
"""The frame-evaluation callback that compiles the functions called by a thread, or None."""

_P = ParamSpec("_P")
_T = TypeVar("_T")

# PyTorch 2.6 lacks some of these functions.
_NATIVE: Any = eval_frame
_HAS_STRATEGIES = hasattr(_NATIVE, "_FrameExecStrategy")


def eager(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes torch.compile leave the function `call`, and all functions that it calls, uncompiled.

    A compiled function has a graph break at each call to `call`; with fullgraph=True it raises an error.
    """
    return _skipped(call if _HAS_STRATEGIES else _hiding(call), with_calls=True)


def eager_around(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes torch.compile run the function `call` uncompiled, but compile the functions that it calls.

    Inside `call`, `set_eval_frame(None)` disables compilation for the code that follows, and returns the compiler to
    pass to `compiled_by`.
    """
    return _skipped(call, with_calls=False)


def eager_methods(kind: type[_T]) -> type[_T]:
    """Applies `eager` to every method defined in the class itself, including static methods."""
    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType):
            setattr(kind, name, eager(method))
        elif isinstance(method, staticmethod):
            setattr(kind, name, staticmethod(eager(method.__func__)))
    return kind


def compiled_by(compiler: Compiler, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Calls `call` with `compiler` enabled."""
    set_eval_frame(compiler)
    try:
        return call(*args, **kwargs)
    finally:
        set_eval_frame(None)


def own_code(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns a copy of `call` with a new code object, because torch.compile limits recompilations per code object."""
    code = cast(FunctionType, call).__code__
    return cast(Callable[_P, _T], FunctionType(code.replace(), call.__globals__, code.co_name))


def _skipped(call: Callable[_P, _T], *, with_calls: bool) -> Callable[_P, _T]:
    code = cast(FunctionType, call).__code__
    if _HAS_STRATEGIES:
        skip, default = _NATIVE._FrameAction.SKIP, _NATIVE._FrameAction.DEFAULT
        _NATIVE.set_code_exec_strategy(code, _NATIVE._FrameExecStrategy(skip, skip if with_calls else default))
    else:
        _NATIVE.skip_code(code)
    vars(call)["_torchdynamo_disable"] = True  # read when a compiled function calls this one
    return call


def _hiding(call: Callable[_P, _T]) -> Callable[_P, _T]:
    @functools.wraps(call)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        compiler = set_eval_frame(None)
        try:
            return call(*args, **kwargs)
        finally:
            set_eval_frame(compiler)

    return called
