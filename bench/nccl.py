"""Compares a training step of Paceline's DDP over nccl on a GPU with the same step of torch's DDP over NCCL.

    python bench/nccl.py [--rounds 20] [--json FILE]

There is one rank, so nothing is sent over a network: the benchmark measures the cost of hooks, buckets, streams and
calls. The model is a transformer with 124 M parameters in bfloat16. The bare module and the two wrappers alternate, a
few steps each; CUDA events around a step measure the duration of everything that the step enqueues on the stream. The
ratio is torch's step time divided by Paceline's; the goal is 1 or more.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Callable

import torch
from report import parser, show
from torch import nn

STEPS = 5
LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT, BATCH = 12, 768, 12, 50304, 1024, 8


class Transformer(nn.Module):
    """A transformer the size of GPT-2 small; its last layer shares its weights with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device, hidden.dtype)
        return self.norm(self.blocks(hidden, mask, is_causal=True)) @ self.tokens.weight.T


def stepper(model: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def milliseconds(step: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(STEPS):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / STEPS


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=20)
    options = arguments.parse_args()
    if torch.cuda.device_count() == 0:
        print("bench/nccl.py measures steps on a GPU, and torch sees none here; nothing was measured")
        return
    import torch.distributed as torch_dist

    import paceline as dist

    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("cpu:paceline,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        torch_dist.init_process_group("nccl", init_method=f"file://{folder}/torch", rank=0, world_size=1)
        torch.manual_seed(0)
        model = Transformer().cuda().bfloat16()
        tokens = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), device="cuda")
        steps = {
            "none": stepper(copy.deepcopy(model), tokens),
            "paceline": stepper(dist.DistributedDataParallel(copy.deepcopy(model)), tokens),
            "torch": stepper(nn.parallel.DistributedDataParallel(copy.deepcopy(model), device_ids=[0]), tokens),
        }
        for step in steps.values():
            milliseconds(step)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.rounds):
            for name, step in steps.items():
                times[name].append(milliseconds(step))
        ms = {name: statistics.median(each) for name, each in times.items()}
        row: dict[str, object] = {
            "GPU": torch.cuda.get_device_name(),
            "params M": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
            **{f"{name} ms": each for name, each in ms.items()},
            "ratio": ms["torch"] / ms["paceline"],
        }
        show("A training step on one GPU, bfloat16, medians", [row], options.json)
        torch_dist.destroy_process_group()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
