"""CommHook: wraps a user-defined function that averages a bucket of gradients and returns a future."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch

from paceline.comm.group.work import Work
from paceline.train.ddp.gradient_buckets import BucketGradients, GradientMemory

T = TypeVar("T")
S = TypeVar("S")


class DeferredFuture(Generic[T]):
    """A future that computes its value when a thread waits for it.

    Callbacks may call collectives, and collectives must run in the same order on every rank. Callbacks of a
    `DeferredFuture` run in the order in which the reducer waits for the futures, which is the same on every rank.
    Callbacks of `Work.get_future` run in the order in which calls complete, which may differ between ranks.

    This class does not derive from `torch.futures.Future`, because `torch.futures.collect_all` waits in C++, where the
    value cannot be computed. Use this module's `collect_all` instead; torch's function rejects a `DeferredFuture`.
    """

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute: Callable[[], T] | None = compute
        self._value: T
        self._error: Exception | None = None

    def __repr__(self) -> str:
        state = "computed when waited for" if self._compute is not None else "done"
        return f"<DeferredFuture, {state}; several: paceline.parallel.hooks.collect_all>"

    def done(self) -> bool:
        """Returns True if the value has been computed."""
        return self._compute is None

    def wait(self) -> T:
        """Returns the value; the first call computes it. If the computation fails, every call raises the same error."""
        compute, self._compute = self._compute, None
        if compute is not None:
            try:
                self._value = compute()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._value

    def value(self) -> T:
        """Returns the same value as `wait`. A callback receives its future and calls this method on it."""
        return self.wait()

    def then(self, callback: Callable[[DeferredFuture[T]], S]) -> DeferredFuture[S]:
        """Returns a future for the result of `callback(self)`."""
        return DeferredFuture(lambda: callback(self))


AnyFuture: TypeAlias = "torch.futures.Future[T] | DeferredFuture[T]"


def future_of(work: Work | None) -> DeferredFuture[list[torch.Tensor]]:
    """Returns a future for the result tensors of an asynchronous collective.

    Raises:
        TypeError: `work` is None.
    """
    if work is None:
        raise TypeError("a collective has a future only if it was called with async_op=True, on a rank of its group")
    return DeferredFuture(work.result)


def collect_all(futures: Sequence[AnyFuture[T]]) -> DeferredFuture[list[T]]:
    """Returns a future for the list of all values. It waits for `futures` in order and raises the first error."""
    return DeferredFuture(lambda: [future.wait() for future in futures])


Reduced = torch.Tensor | Sequence[torch.Tensor]


class GradBucket:
    """The argument to a communication hook: the gradients of a bucket, concatenated into a flat tensor.

    The class provides the methods of `torch.distributed.GradBucket`.
    """

    def __init__(self, index: int, is_last: bool, buffer: torch.Tensor, params: Sequence[torch.Tensor]) -> None:
        self._index = index
        self._is_last = is_last
        self._buffer = buffer
        self._params = list(params)

    def index(self) -> int:
        """Returns the bucket's index. On every rank, buckets are passed to the hook in ascending order of index."""
        return self._index

    def is_last(self) -> bool:
        """Returns True if this is the last bucket in the backward pass."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Returns all gradients in one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the buffer with another tensor, which may have a different dtype."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Returns the parameters' gradients as views of the buffer.

        Raises:
            ValueError: the buffer was replaced with a tensor of a different size.
        """
        total = sum(param.numel() for param in self._params)
        if self._buffer.numel() != total:
            raise ValueError(
                f"the buffer of bucket {self._index} has {self._buffer.numel()} elements after set_buffer(), and the "
                f"bucket's gradients have {total}; call gradients() before set_buffer()"
            )
        parts = self._buffer.split([param.numel() for param in self._params])
        return [
            part.as_strided(param.shape, torch.empty_like(param, device="meta").stride())
            for part, param in zip(parts, self._params, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Returns the bucket's parameters, in the order of their gradients in the buffer."""
        return list(self._params)


Hook = Callable[[object, GradBucket], "AnyFuture[Reduced] | Work"]


def reduced_tensor(future: AnyFuture[Reduced] | Work) -> torch.Tensor:
    """Waits for a hook's result, and returns the averaged tensor, which the result may contain in a list."""
    reduced = future.result() if isinstance(future, Work) else future.wait()
    return reduced if isinstance(reduced, torch.Tensor) else reduced[0]


@dataclass(frozen=True)
class HookedWork:
    """Handle to a bucket that a hook is averaging; `wait` copies the result into the gradients."""

    future: AnyFuture[Reduced] | Work
    bucket: GradBucket
    memory: GradientMemory

    def wait(self) -> None:
        """Waits for the hook's future and copies its value into the gradients."""
        reduced = reduced_tensor(self.future)
        if reduced.numel() != self.memory.count:
            raise ValueError(
                f"the communication hook returned {reduced.numel()} elements for bucket {self.bucket.index()}, whose "
                f"gradients have {self.memory.count}; its future must hold the averaged gradients in the order of "
                "bucket.buffer()"
            )
        gradients = _flat_views(self.memory.tensors)
        if (
            len(gradients) == 1
            and reduced.data_ptr() == gradients[0].data_ptr()
            and reduced.dtype == gradients[0].dtype
        ):
            return  # the hook has averaged the gradients in place
        parts = reduced.reshape(-1).split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part)


class CommHook:
    """A communication hook together with its state.

    If `sets_divisor` is False, `join` rescales the hook's results like the engine's averages.
    """

    def __init__(self, state: object, hook: Hook, *, sets_divisor: bool = True) -> None:
        self.name = str(getattr(hook, "__qualname__", repr(hook)))
        self.sets_divisor = sets_divisor
        self._state = state
        self._hook = hook

    def start(self, index: int, is_last: bool, gradients: BucketGradients, memory: GradientMemory) -> HookedWork:
        """Calls the hook with a bucket and returns a handle to the pending result."""
        flat = memory.tensors[0] if memory.views is not None else torch.cat(_flat_views(memory.tensors))
        bucket = GradBucket(index, is_last, flat, gradients.params)
        future = self._hook(self._state, bucket)
        # `torch.futures.Future.then` returns an instance of the base class, torch._C.Future.
        if not isinstance(future, (torch._C.Future, DeferredFuture, Work)):
            raise TypeError(
                f"the communication hook {self.name} returned {type(future).__name__}; it must return a "
                "torch.futures.Future of the averaged buffer, or the Work of a call with async_op=True"
            )
        return HookedWork(future, bucket, memory)


def _flat_views(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns flat views with the elements in memory order, which is the same on every rank."""
    return [tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in tensors]
