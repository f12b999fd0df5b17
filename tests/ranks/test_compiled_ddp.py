"""Compiled models in Paceline's data parallelism, and in PyTorch's over the backend "paceline".

Each compiled model trains like the same model without compilation.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from one_world import OneWorld
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDataParallel
from torch_programs import Comparison

import paceline
from paceline.train.ddp.hooks import fp16_compress_hook

pytestmark = pytest.mark.timeout(300)  # compilers are slow

STEPS = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "no broadcast": {"broadcast_buffers": False},
    "one device": {"device_ids": ["cpu"]},
    "logical shards": {"deterministic": True, "logical_shards": 4},
    "overlap": {"overlap": True, "bucket_cap_mb": 0.0001},
}
TORCHS = "torch's"
OWN = "Paceline's"


class Network(nn.Module):
    """A network with buffers, and a branch that only some steps use."""

    def __init__(self, normalization: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), normalization(8), nn.ReLU())
        self.branch = nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, uses_branch: bool = True) -> torch.Tensor:
        self.calls.add_(1)
        y = self.layers(x)
        return self.out(self.branch(y) if uses_branch else y)


class Counting:
    """A compiler that runs graphs unchanged or in functional form, and counts the graphs with a linear layer."""

    def __init__(self, backend: str) -> None:
        self._compile = torch._dynamo.lookup_backend(backend)
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += any("linear" in str(node.target) for node in graph.graph.nodes)
        compiled: Callable[..., Any] = self._compile(graph, inputs)
        return compiled


def wrap(face: str, model: nn.Module, **options: Any) -> nn.Module:
    kind = TorchDataParallel if face == TORCHS else paceline.DistributedDataParallel
    return kind(model, **options)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + torch_or_own_rank()))


def torch_or_own_rank() -> int:
    return torch_dist.get_rank() if torch_dist.is_initialized() else paceline.get_rank()


def train(
    face: str, how: str, compiler: Counting | None, make: Callable[[], nn.Module], extras: tuple[str, ...]
) -> list[torch.Tensor]:
    """Returns the losses, and the model's gradients, parameters and buffers at the end."""
    torch.manual_seed(3 + torch_or_own_rank())
    torch._dynamo.reset()
    options: dict[str, Any] = {}
    for name in extras:
        options |= OPTIONS.get(name, {})
    inner = make()
    if how == "before" and compiler is not None:
        inner = torch.compile(inner, backend=compiler)
    model = wrap(face, inner, **options)
    if "hook" in extras:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook if face == TORCHS else fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    called: Any = model
    if compiler is not None and how == "after":
        called = torch.compile(model, backend=compiler)
    if compiler is not None and how == "in place":
        model.compile(backend=compiler)

    def compute(x: torch.Tensor, *args: Any) -> torch.Tensor:
        loss = called(x, *args).square().mean()
        loss.backward()
        return loss

    def accumulate(x: torch.Tensor) -> torch.Tensor:
        with model.no_sync():
            return compute(x)

    if compiler is not None and how == "step":
        compute = torch.compile(compute, backend=compiler)
        accumulate = torch.compile(accumulate, backend=compiler)
    losses = []
    for step in range(STEPS):
        args = (step % 2 == torch_or_own_rank(),) if "unused parameters" in extras else ()
        optimizer.zero_grad()
        if "no_sync" in extras:
            accumulate(batch(10 + step))
        losses.append(compute(batch(step), *args).detach())
        optimizer.step()
    model.eval()
    losses.append(called(batch(STEPS)).detach())
    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    return [*losses, *gradients, *(each.detach() for each in model.parameters()), *model.buffers()]


def compiled(face: str, how: str, backend: str, *extras: str, kind: str = "network") -> list[torch.Tensor]:
    make: Callable[[], nn.Module] = {
        "network": Network,
        "layers": lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)),
        "synchronized": lambda: paceline.convert_sync_batchnorm(Network()),
    }[kind]
    expected = train(face, how, None, make, extras)
    if face == TORCHS and torch_dist.get_backend() == "gloo":
        return expected  # the expected result of the compiled model with Paceline
    compiler = Counting(backend)
    seen = train(face, how, compiler, make, extras)
    assert len(seen) == len(expected)
    for ours, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert compiler.graphs > 0
    return seen


def layers_of_torchs_own() -> list[torch.Tensor]:
    return compiled(OWN, "after", "eager", kind="layers")


def synchronized_statistics() -> list[torch.Tensor]:
    return compiled(OWN, "after", "eager", kind="synchronized")


def copies_of_modules_that_are_compiled_in_place() -> None:
    torch._dynamo.reset()
    model = paceline.DistributedDataParallel(paceline.convert_sync_batchnorm(Network()))
    compiler = Counting("eager")
    model.compile(backend=compiler)
    model.module.layers[1].compile(backend=compiler)
    model(batch(0)).sum().backward()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.zero_grad()
        copied.module.out.bias.data += 1
        torch.testing.assert_close(copied(batch(1)), model(batch(1)) + 1)
        copied(batch(1)).sum().backward()
        assert copied.module.out.bias.grad.tolist() == [4.0] * 3


def programs(face: str) -> list[Callable[[], list[torch.Tensor]]]:
    return [
        partial(compiled, face, "after", "aot_eager"),
        partial(compiled, face, "after", "eager", "static graph"),
        partial(compiled, face, "after", "eager", "hook"),
        partial(compiled, face, "after", "eager", "unused parameters"),
        *(partial(compiled, face, how, "eager", "hook", "no_sync") for how in ("before", "in place", "step")),
        *(partial(compiled, face, how, "eager", "static graph", "no broadcast") for how in ("before", "in place")),
    ]


OF_TORCH = Comparison(*programs(TORCHS), timeout_s=280)
OF_PACELINE = OneWorld(
    *programs(OWN),
    partial(compiled, OWN, "after", "eager", "one device", "no_sync"),
    partial(compiled, OWN, "after", "eager", "logical shards"),
    partial(compiled, OWN, "step", "eager", "overlap"),
    layers_of_torchs_own,
    synchronized_statistics,
    copies_of_modules_that_are_compiled_in_place,
    timeout_s=280,
)


@pytest.mark.parametrize("name", OF_TORCH.programs)
def test_torchs_wrapper_trains_compiled_models_as_over_gloo(name: str) -> None:
    OF_TORCH.require(2, name)


@pytest.mark.parametrize("name", OF_PACELINE.programs)
def test_a_compiled_model_trains_as_one_that_is_not(name: str) -> None:
    OF_PACELINE.require(2, name)
