"""Keeps calls that move data between ranks out of compiled graphs.

torch.compile would otherwise trace into them, down to the functions of the core, which it cannot trace. It would also
compile those functions that PyTorch calls back while compiled code runs, such as hooks and the methods of a backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

from torch._C._dynamo import eval_frame
from torch._C._dynamo.eval_frame import set_eval_frame as set_eval_frame

Compiler: TypeAlias = Any
"""What compiles the functions that a thread calls; None if nothing does."""

_P = ParamSpec("_P")
_T = TypeVar("_T")

# PyTorch 2.6 has only a part of these.
_NATIVE: Any = eval_frame
_HAS_STRATEGIES = hasattr(_NATIVE, "_FrameExecStrategy")


def eager(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Has torch.compile run the function `call`, and all that it calls, as they are.

    A compiled function that calls it breaks its graph there; with fullgraph=True it raises.
    """
    return _skipped(call if _HAS_STRATEGIES else _hiding(call), with_calls=True)


def eager_around(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Has torch.compile run the function `call` as it is, and compile what it calls.

    Inside, `set_eval_frame(None)` keeps what follows from being compiled. It returns the compiler, which `compiled_by`
    takes.
    """
    return _skipped(call, with_calls=False)


def eager_methods(kind: type[_T]) -> type[_T]:
    """Makes every method that the class itself defines `eager`, static ones too."""
    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType):
            setattr(kind, name, eager(method))
        elif isinstance(method, staticmethod):
            setattr(kind, name, staticmethod(eager(method.__func__)))
    return kind


def compiled_by(compiler: Compiler, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Calls `call` where `compiler` compiles it."""
    set_eval_frame(compiler)
    try:
        return call(*args, **kwargs)
    finally:
        set_eval_frame(None)


def own_code(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns `call` as a function that torch.compile compiles apart; it limits how often it compiles one function."""
    code = cast(FunctionType, call).__code__
    return cast(Callable[_P, _T], FunctionType(code.replace(), call.__globals__, code.co_name))


def _skipped(call: Callable[_P, _T], *, with_calls: bool) -> Callable[_P, _T]:
    code = cast(FunctionType, call).__code__
    if _HAS_STRATEGIES:
        skip, default = _NATIVE._FrameAction.SKIP, _NATIVE._FrameAction.DEFAULT
        _NATIVE.set_code_exec_strategy(code, _NATIVE._FrameExecStrategy(skip, skip if with_calls else default))
    else:
        _NATIVE.skip_code(code)
    vars(call)["_torchdynamo_disable"] = True  # for a function that is compiled and calls this one
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
