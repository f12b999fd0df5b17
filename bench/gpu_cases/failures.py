"""Tests ranks that die, are late, raise errors or leave early, and measures how soon the others raise errors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch

import paceline as dist
from gpu_cases.session import Session, Setting, open_device, session

TIMEOUT_S = 5.0
BUSY_S = 4.0  # delay of a stream before the last call


def _reduced(here: Session) -> torch.Tensor:
    """Runs a first call, which connects the ranks."""
    tensor = torch.ones(1000, device=here.device)
    dist.all_reduce(tensor)
    here.synchronize()
    return tensor


def _error_of(call: Callable[[], object], limit_s: float) -> tuple[BaseException, float]:
    """Repeats a call until it raises an error; returns the error and the number of seconds until then."""
    started = time.perf_counter()
    while time.perf_counter() - started < limit_s:
        try:
            call()
        except (RuntimeError, OSError) as error:
            return error, time.perf_counter() - started
        time.sleep(0.02)
    raise AssertionError(f"no error within {limit_s:.0f} s")


def killed(setting: Setting) -> dict[str, object]:
    """Kills the last rank; within seconds, the other ranks must raise an error that identifies this rank."""
    with session(setting, theirs=False, timeout_s=60, ends=False) as here:
        tensor = _reduced(here)
        dist.barrier()
        if here.rank == here.size - 1:
            os._exit(1)

        def call() -> None:
            dist.all_reduce(tensor)
            here.synchronize()

        error, after_s = _error_of(call, 20)
        if f"rank {here.size - 1}" not in str(error):
            raise AssertionError(f"the error does not name rank {here.size - 1}: {error}")
        return {"error": type(error).__name__, "after s": after_s}


def late(setting: Setting) -> dict[str, object]:
    """Keeps the last rank out of a call until the call times out after 5 s; the error must identify this rank."""
    with session(setting, theirs=False, timeout_s=60, ends=False) as here:
        tensor = _reduced(here)
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
        dist.all_reduce(tensor, group=group)
        here.synchronize()
        if here.rank == here.size - 1:
            time.sleep(2 * TIMEOUT_S)
            return {"error": "-", "after s": 0.0}

        def call() -> None:
            dist.all_reduce(tensor, group=group)
            here.synchronize()

        error, after_s = _error_of(call, 4 * TIMEOUT_S)
        if f"rank {here.size - 1}" not in str(error):
            raise AssertionError(f"the error does not name rank {here.size - 1}: {error}")
        time.sleep(max(0.0, 2 * TIMEOUT_S - after_s))
        return {"error": type(error).__name__, "after s": after_s}


def raised(setting: Setting) -> dict[str, object]:
    """Raises an error on one rank and ends its process; the other ranks must fail before the timeout."""
    with session(setting, theirs=False, timeout_s=60, ends=False) as here:
        tensor = _reduced(here)
        dist.barrier()
        if here.rank == here.size - 1:
            try:
                raise ValueError("a mistake in the program of one rank")
            except ValueError:
                os._exit(1)

        def call() -> None:
            dist.all_reduce(tensor, async_op=True).wait()
            here.synchronize()

        error, after_s = _error_of(call, 20)
        return {"error": type(error).__name__, "after s": after_s}


def destroyed_behind_a_busy_stream(setting: Setting) -> dict[str, object]:
    """Destroys the group right after a call that the device runs seconds later; the result must be complete."""
    with session(setting, theirs=False, timeout_s=60, ends=False) as here:
        tensor = _reduced(here)
        started = time.perf_counter()
        if here.device.type == "cuda":
            matrix = torch.randn(4096, 4096, device=here.device)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(20):
                matrix = torch.tanh(matrix @ matrix)
            torch.cuda.synchronize()
            count = int(20 * BUSY_S / (time.perf_counter() - begun))
            started = time.perf_counter()
            for _ in range(count):
                matrix = torch.tanh(matrix @ matrix)
            tensor = torch.full((1 << 20,), here.rank + 1.0, device=here.device) + matrix[0, 0] * 0
        else:
            here.delay()
            tensor = torch.full((1 << 20,), here.rank + 1.0, device=here.device)
        work = dist.all_reduce(tensor, async_op=True)
        enqueued_s = time.perf_counter() - started
        del work
        dist.destroy_process_group()
        here.synchronize()
        wanted = here.size * (here.size + 1) / 2
        wrong = int(tensor.ne(wanted).sum().item())
        if wrong:
            raise AssertionError(f"rank {here.rank}: {wrong} of {tensor.numel()} elements are not {wanted}")
        return {"enqueued after s": enqueued_s, "after s": time.perf_counter() - started}


def two_on_one_gpu(setting: Setting) -> dict[str, object]:
    """Puts all ranks on device 0; nccl must reject this, and its error message must include the solution."""
    os.environ["LOCAL_RANK"] = "0"
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    device = open_device(setting)
    try:
        dist.init_process_group(setting.backend, timeout=timedelta(seconds=30))
        dist.all_reduce(torch.ones(3, device=device))
    except dist.CollectiveError as error:
        if "one GPU" not in str(error):
            raise
        return {"error": type(error).__name__}
    raise AssertionError("two ranks on one GPU were not refused")
