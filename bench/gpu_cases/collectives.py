"""Compares every collective with its counterpart in torch.distributed, for all types, layouts and stream patterns."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch

from gpu_cases.session import Session, Setting, modules, session

Outputs = list[torch.Tensor]


class Call(Protocol):
    """A collective of either library; returns the tensors that it writes and, if it is asynchronous, a work object."""

    def __call__(
        self, on: ModuleType, here: Session, x: torch.Tensor, op: str, **options: bool
    ) -> tuple[Outputs, Any]: ...


TYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
SMALL = (torch.float8_e4m3fn, torch.float8_e5m2)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
BITWISE = ("BAND", "BOR", "BXOR")
SHAPE = (4, 3, 4, 5)


def like(x: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """Returns a tensor for results, with the layout of `x` and `rows` times as many rows."""
    shape = list(x.shape)
    shape[0] *= rows or 1
    if x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    if not x.is_contiguous():
        return torch.empty((*shape[:-1], 2 * shape[-1]), dtype=x.dtype, device=x.device)[..., ::2]
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def blocks(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Returns an input for each rank, each with the shape of `x`."""
    made = []
    for shift in range(size):
        block = like(x)
        block.copy_(x.view(torch.uint8).roll(shift, 0).view(x.dtype) if x.dtype in SMALL else x.roll(shift, 0))
        made.append(block)
    return made


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    whole = like(parts[0], len(parts))
    for at, part in enumerate(parts):
        whole[at * len(part) : (at + 1) * len(part)].copy_(part)
    return whole


def all_reduce(on: ModuleType, here: Session, x: torch.Tensor, op: str, **options: bool) -> tuple[Outputs, Any]:
    return [x], on.all_reduce(x, getattr(on.ReduceOp, op), **options)


def reduce(on: ModuleType, here: Session, x: torch.Tensor, op: str, **options: bool) -> tuple[Outputs, Any]:
    root = here.size - 1
    work = on.reduce(x, root, getattr(on.ReduceOp, op), **options)
    return [x] if here.rank == root else [], work


def reduce_scatter(on: ModuleType, here: Session, x: torch.Tensor, op: str, **options: bool) -> tuple[Outputs, Any]:
    output = like(x)
    return [output], on.reduce_scatter(output, blocks(x, here.size), getattr(on.ReduceOp, op), **options)


def reduce_scatter_tensor(
    on: ModuleType, here: Session, x: torch.Tensor, op: str, **options: bool
) -> tuple[Outputs, Any]:
    output = like(x)
    whole = joined(blocks(x, here.size))
    return [output], on.reduce_scatter_tensor(output, whole, getattr(on.ReduceOp, op), **options)


def broadcast(on: ModuleType, here: Session, x: torch.Tensor, op: str, **options: bool) -> tuple[Outputs, Any]:
    return [x], on.broadcast(x, here.size - 1, **options)


def all_gather(on: ModuleType, here: Session, x: torch.Tensor, op: str, **options: bool) -> tuple[Outputs, Any]:
    outputs = [like(x) for _ in range(here.size)]
    return outputs, on.all_gather(outputs, x, **options)


def all_gather_into_tensor(
    on: ModuleType, here: Session, x: torch.Tensor, op: str, **options: bool
) -> tuple[Outputs, Any]:
    output = like(x, here.size)
    return [output], on.all_gather_into_tensor(output, x, **options)


def gather(on: ModuleType, here: Session, x: torch.Tensor, op: str, **options: bool) -> tuple[Outputs, Any]:
    root = here.size - 1
    outputs = [like(x) for _ in range(here.size)] if here.rank == root else None
    return outputs or [], on.gather(x, outputs, dst=root, **options)


def scatter(on: ModuleType, here: Session, x: torch.Tensor, op: str, **options: bool) -> tuple[Outputs, Any]:
    output = like(x)
    inputs = blocks(x, here.size) if here.rank == 0 else None
    return [output], on.scatter(output, inputs, src=0, **options)


def all_to_all(on: ModuleType, here: Session, x: torch.Tensor, op: str, **options: bool) -> tuple[Outputs, Any]:
    outputs = [like(x) for _ in range(here.size)]
    return outputs, on.all_to_all(outputs, blocks(x, here.size), **options)


def all_to_all_single(on: ModuleType, here: Session, x: torch.Tensor, op: str, **options: bool) -> tuple[Outputs, Any]:
    output = like(x, here.size)
    return [output], on.all_to_all_single(output, joined(blocks(x, here.size)), **options)


class _Works:
    """Combines several work objects into one."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def batch_isend_irecv(
    on: ModuleType, here: Session, x: torch.Tensor, op: str, async_op: bool = False
) -> tuple[Outputs, Any]:
    """Sends to the next rank and receives from the previous one."""
    received = like(x)
    send = on.P2POp(on.isend, x, (here.rank + 1) % here.size)
    receive = on.P2POp(on.irecv, received, (here.rank - 1) % here.size)
    work = _Works(on.batch_isend_irecv([send, receive]))
    if not async_op:
        work.wait()
    return [received], work if async_op else None


CALLS: dict[str, Call] = {
    each.__name__: each
    for each in (
        *(all_reduce, reduce, reduce_scatter, reduce_scatter_tensor, broadcast, all_gather, all_gather_into_tensor),
        *(gather, scatter, all_to_all, all_to_all_single, batch_isend_irecv),
    )
}
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
LAYOUTS = ("contiguous", "strided", "channels_last")


def made(here: Session, dtype: torch.dtype, shape: tuple[int, ...], op: str) -> torch.Tensor:
    """Returns a CPU tensor of small integers, whose sums are exact in any order."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(100 * here.rank + count)
    highest = 2 if op == "PRODUCT" or dtype is torch.bool else 4 if dtype in SMALL else 8
    numbers = torch.randint(0, highest, shape, generator=generator)
    if op == "PRODUCT":
        numbers += 1
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.double().flip(0)).to(dtype)
    return numbers.to(dtype)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "strided":
        return torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype, device=x.device)[..., ::2].copy_(x)
    return x


def on_cpu(outputs: Outputs) -> Outputs:
    return [output.detach().cpu().contiguous() for output in outputs]


def compare(here: Session, label: str, ours: Outputs, theirs: Outputs, is_exact: bool) -> None:
    """Requires bitwise equality, except for means: they are not exact, so approximate equality is sufficient."""
    if len(ours) != len(theirs):
        raise AssertionError(f"{label}: {len(ours)} results instead of {len(theirs)}")
    for mine, wanted in zip(ours, theirs, strict=True):
        if mine.dtype is torch.bool:  # gloo returns 2 for this sum of booleans
            differs = mine.view(torch.uint8).ne(0) != wanted.view(torch.uint8).ne(0)
        elif mine.dtype in SMALL:
            differs = mine.view(torch.uint8) != wanted.view(torch.uint8)
        elif is_exact:
            differs = mine != wanted
        else:
            differs = ~torch.isclose(mine, wanted, rtol=1e-2)
        if differs.any():
            at = int(differs.flatten().nonzero()[0])
            values = f"{mine.flatten()[at].item()} instead of {wanted.flatten()[at].item()}"
            raise AssertionError(f"rank {here.rank}: {label}: {int(differs.sum())} elements differ, at {at} {values}")


def _refusal(call: Callable[[], Outputs]) -> tuple[Outputs | None, str]:
    """Returns the results, or the error message if the library rejected the call before running it."""
    try:
        return call(), ""
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return None, f"{type(error).__name__}: {error}".split("\n")[0][:300]


def all_types(setting: Setting, name: str) -> dict[str, object]:
    """Compares a collective for every type, reduction and layout; returns the number of compared calls."""
    call, (ours, theirs) = CALLS[name], modules()
    compared, demanding, alone, refused = 0, 0, 0, 0
    with session(setting) as here:
        is_exact = here.size & (here.size - 1) == 0
        for dtype in TYPES:
            for op in OPS if name in REDUCTIONS else ("SUM",):
                if op in BITWISE and (dtype.is_floating_point or dtype.is_complex):
                    continue
                x = made(here, dtype, SHAPE, op)

                def reference(x: torch.Tensor = x, op: str = op) -> Outputs:
                    return on_cpu(call(theirs, here, x.to(here.reference_device, copy=True), op)[0])

                # torch opens a group of NCCL calls, rejects this type and never closes the group, so later calls hang
                is_refused = here.reference_device.type == "cuda" and dtype is torch.int16
                wanted, reason = (None, "") if is_refused else _refusal(reference)
                if wanted is None and dtype is torch.float32 and here.device.type == "cuda":
                    raise AssertionError(f"rank {here.rank}: torch's own {name} {op} of floats fails: {reason}")
                for layout in LAYOUTS:

                    def tried(x: torch.Tensor = x, op: str = op, layout: str = layout) -> Outputs:
                        return on_cpu(call(ours, here, laid_out(x.to(here.device, copy=True), layout), op)[0])

                    label = f"{name} {op} of {dtype}, {layout}".replace(" SUM of", " of")
                    found, why = _refusal(tried)
                    if found is None and layout != "contiguous" and "contiguous" in why:
                        demanding += 1
                        continue
                    if found is None and here.is_staged and dtype in SMALL:  # not reduced by the CPU engine
                        refused += 1
                        continue
                    if found is None and wanted is not None:
                        raise AssertionError(f"rank {here.rank}: {label}: torch takes it, and Paceline raises {why}")
                    if found is None:
                        refused += 1
                    elif wanted is None:
                        alone += 1
                    else:
                        compare(here, label, found, wanted, is_exact or op != "AVG")
                        compared += 1
    return {
        "calls": compared,
        "refused": refused,
        "only Paceline takes": alone,
        "must be contiguous": demanding,
    }


def plainly(here: Session, call: Call, on: ModuleType, x: torch.Tensor) -> Outputs:
    outputs, _ = call(on, here, x.clone(), "SUM")
    return outputs


def within_a_side_stream(here: Session, call: Call, on: ModuleType, x: torch.Tensor) -> Outputs:
    """Computes the input after a delay on a side stream; calls the collective and reads the result on that stream."""
    stream = here.stream()
    stream.wait_stream(here.current_stream())
    with here.within(stream):
        here.delay()
        outputs, _ = call(on, here, x * 1, "SUM")
        results = [output.clone() for output in outputs]
    here.current_stream().wait_stream(stream)
    return results


def waited_for_by_another_stream(here: Session, call: Call, on: ModuleType, x: torch.Tensor) -> Outputs:
    """Calls the collective on the current stream; waits and reads the result on another stream."""
    stream = here.stream()
    here.delay()
    outputs, work = call(on, here, x * 1, "SUM", async_op=True)
    with here.within(stream):
        work.wait()
        results = [output.clone() for output in outputs]
    here.current_stream().wait_stream(stream)
    return results


def without_wait(here: Session, call: Call, on: ModuleType, x: torch.Tensor) -> Outputs:
    """Waits for the device, but not for the call."""
    here.delay()
    outputs, work = call(on, here, x * 1, "SUM", async_op=True)
    if here.has_streams:
        here.synchronize()
    else:
        work.wait()
    return outputs


def freed_at_once(here: Session, call: Call, on: ModuleType, x: torch.Tensor) -> Outputs:
    """Frees the input right after the call, then allocates new memory and writes to it."""
    here.delay()
    outputs, work = call(on, here, x * 1, "SUM", async_op=True)
    others = [torch.full_like(x, 77) for _ in range(8)]
    work.wait()
    del others
    return outputs


def many_at_once(here: Session, call: Call, on: ModuleType, x: torch.Tensor) -> Outputs:
    """Starts ten calls and waits for them in reverse order."""
    started = [call(on, here, x + at, "SUM", async_op=True) for at in range(10)]
    for _, work in reversed(started):
        work.wait()
    return [output for outputs, _ in started for output in outputs]


PATTERNS = {
    "plain": plainly,
    "side stream": within_a_side_stream,
    "second stream waits": waited_for_by_another_stream,
    "without wait": without_wait,
    "freed at once": freed_at_once,
    "many at once": many_at_once,
}
OF_STREAMS = ("side stream", "second stream waits")


def all_patterns(setting: Setting, name: str) -> dict[str, object]:
    """Compares a collective several times for every stream pattern."""
    call, (ours, theirs) = CALLS[name], modules()
    compared = 0
    with session(setting) as here:
        for dtype in (torch.float32, torch.bfloat16):
            x = made(here, dtype, (1 << 16,), "SUM")
            for pattern, run in PATTERNS.items():
                if pattern in OF_STREAMS and not here.has_streams:
                    continue
                same = PATTERNS["many at once" if pattern == "many at once" else "plain"]
                wanted = on_cpu(same(here, call, theirs, x.to(here.reference_device, copy=True)))
                for _ in range(3):
                    outputs = run(here, call, ours, x.to(here.device, copy=True))
                    compare(here, f"{name}, {pattern}, {dtype}", on_cpu(outputs), wanted, is_exact=True)
                    compared += 1
    return {"calls": compared}


def objects_and_barriers(setting: Setting) -> None:
    """Sends objects, and runs barriers with and without device_ids."""
    ours, _ = modules()
    with session(setting, theirs=False) as here:
        told: list[object] = [None] * here.size
        ours.all_gather_object(told, {"rank": here.rank})
        if told != [{"rank": rank} for rank in range(here.size)]:
            raise AssertionError(f"all_gather_object returned {told}")
        with torch.device(here.device):
            ours.all_gather_object(told, [here.rank] * 1000)
            listed = [here.rank, "text"] if here.rank == 0 else [None, None]
            ours.broadcast_object_list(listed, src=0)
        if listed != [0, "text"]:
            raise AssertionError(f"broadcast_object_list returned {listed}")
        ours.barrier()
        if here.device.type != "cpu":
            ours.barrier(device_ids=[here.device.index])
        ours.monitored_barrier()


def subgroups(setting: Setting) -> None:
    """Runs reductions in turn in a group of one rank, in a group with reversed ranks, and in the default group."""
    ours, _ = modules()
    with session(setting, theirs=False) as here:
        mirrored = ours.new_group(list(reversed(range(here.size))))
        alone = [ours.new_group([rank]) for rank in range(here.size)][here.rank]
        for _ in range(3):
            tensor = torch.full((1000,), here.rank + 1.0, device=here.device)
            ours.all_reduce(tensor, group=alone)
            ours.all_reduce(tensor, group=mirrored)
            ours.all_reduce(tensor)
            wanted = here.size * here.size * (here.size + 1) / 2
            if not tensor.eq(wanted).all().item():
                raise AssertionError(f"the sum is {tensor[0].item()} instead of {wanted}")
