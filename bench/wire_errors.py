"""Measures the errors of bf16, int8 and int4 on the wire, and the speed of packing.

    python bench/wire_errors.py [--steps 200] [--json FILE]

"one rounding" is the root mean square error of packing and unpacking, relative to the root mean square of the numbers.
"2 hosts" and "8 hosts" are the same error for a whole all_reduce across that many hosts, with different numbers on
each. With two hosts, both hosts' sums are rounded. With more hosts, each host's part is rounded on its way to the owner
of a slice, except the owner's own part, and then the sum is rounded. The numbers are normally distributed, or are
gradients of the model from examples/char_lm.py after some training steps, from a different batch on each host.
"feedback" is the error of the mean of 100 all_reduces of the same numbers across 2 hosts, with error feedback.
Throughputs are in bytes of float32 per second of one thread's processor time, with residuals.
"""

from __future__ import annotations

import statistics
import time

import char_text
import torch
from report import parser, show

from paceline import _core
from paceline.comm.engine.channel import DTYPE_CODES, WIRE_CODES

FLOAT32 = DTYPE_CODES[torch.float32]
BATCH = 16
CALLS = 100
SPEED_ELEMENTS, ROUNDS = 1 << 20, 15


def rounded(wire: str, values: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    code, level = WIRE_CODES[wire], _core.simd_level()
    packed = torch.empty(_core.packed_size(code, values.numel()), dtype=torch.uint8)
    at = 0 if residual is None else residual.data_ptr()
    _core.pack(code, level, FLOAT32, values.data_ptr(), at, packed.data_ptr(), values.numel())
    out = torch.empty_like(values)
    _core.unpack(code, level, FLOAT32, packed.data_ptr(), out.data_ptr(), values.numel())
    return out


def reduced(wire: str, parts: list[torch.Tensor], residuals: list[torch.Tensor] | None = None) -> torch.Tensor:
    """Returns the sum of the hosts' `parts`, rounded as in an all-reduce with `wire`.

    With two hosts, both parts are rounded. With more hosts, all parts except that of the slice's owner (the first host)
    are rounded, and then the sum is rounded.
    """
    kept = residuals or [None] * len(parts)
    if len(parts) == 2:
        return sum(rounded(wire, part, residual) for part, residual in zip(parts, kept, strict=True))
    total = parts[0].clone()
    for part, residual in zip(parts[1:], kept[1:], strict=True):
        total += rounded(wire, part, residual)
    return rounded(wire, total, kept[0])


def relative_rms(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact.double()).pow(2).mean().sqrt() / exact.double().pow(2).mean().sqrt())


def gradients(steps: int, hosts: int) -> list[torch.Tensor]:
    """Returns the gradients of `hosts` different batches after `steps` steps, each as a flat tensor in bucket order."""
    torch.manual_seed(0)
    text = char_text.Text.read().train
    model = char_text.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    found = []
    for step in range(steps + hosts):
        optimizer.zero_grad()
        char_text.loss_of(model, *char_text.batch(text, BATCH, torch.default_generator)).backward()
        if step < steps:
            optimizer.step()
        else:
            found.append(torch.cat([param.grad.flatten() for param in reversed(list(model.parameters()))]))
    return found


def errors(wire: str, name: str, parts: list[torch.Tensor]) -> dict[str, object]:
    row: dict[str, object] = {"wire": wire, "numbers": name}
    row["one rounding"] = relative_rms(rounded(wire, parts[0]), parts[0])
    for hosts in (2, len(parts)):
        row[f"{hosts} hosts"] = relative_rms(reduced(wire, parts[:hosts]), sum(parts[1:hosts], parts[0]))
    residuals = [torch.zeros_like(parts[0]) for _ in range(2)]
    mean = torch.zeros_like(parts[0], dtype=torch.float64)
    for _ in range(CALLS):
        mean += reduced(wire, parts[:2], residuals).double() / CALLS
    row["feedback"] = relative_rms(mean, parts[0].double() + parts[1].double())
    return row


def speeds(wire: str) -> dict[str, object]:
    code, count = WIRE_CODES[wire], SPEED_ELEMENTS
    values, residual = torch.randn(count), torch.zeros(count)
    packed = torch.empty(_core.packed_size(code, count), dtype=torch.uint8)
    row: dict[str, object] = {"wire": wire}
    for level in _core.wire_levels():
        where = code, level, FLOAT32
        kernels = {
            "pack": lambda at=where: _core.pack(*at, values.data_ptr(), residual.data_ptr(), packed.data_ptr(), count),
            "unpack": lambda at=where: _core.unpack(*at, packed.data_ptr(), values.data_ptr(), count),
            "add": lambda at=where: _core.add_packed(*at, packed.data_ptr(), values.data_ptr(), count, 2),
        }
        for name, kernel in kernels.items():
            took_s = []
            for _ in range(ROUNDS):
                started = time.thread_time()
                kernel()
                took_s.append(time.thread_time() - started)
            row[f"{level} {name} GB/s"] = 4e-9 * count / statistics.median(took_s)
    return row


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument(
        "--steps", type=int, default=200, help="number of training steps before the gradients are taken"
    )
    options = arguments.parse_args()
    torch.set_num_threads(1)
    show("Throughput of packing and unpacking", [speeds(wire) for wire in WIRE_CODES], None)
    torch.manual_seed(1)
    normal = [torch.randn(1 << 20) for _ in range(8)]
    of_training = gradients(options.steps, 8)
    rows = [
        errors(wire, name, parts)
        for wire in WIRE_CODES
        for name, parts in (("normal", normal), ("gradients", of_training))
    ]
    show("Relative errors (root mean square)", rows, options.json)


if __name__ == "__main__":
    main()
