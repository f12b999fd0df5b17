"""DistributedDataParallel accepts everything that torch's accepts over gloo, with equal results.

Modules change after wrapping, inputs and outputs contain themselves or are nested tensors, modules are scripted or
traced, and buffers are of every kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from one_world import Program, merged, name_of, require, run_in_turn
from torch import nn
from torch.nn.utils import prune
from torch_programs import require_equal
from world import Ranks

import paceline as dist

Make = Callable[[], nn.Module]
Change = Callable[[nn.Module], object]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.activation = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()
        self.last = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.activation(self.norm(self.first(x))))


class Criterion(nn.Module):
    """A loss that creates its buffers on first use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "loss"):
            self.loss = nn.BCEWithLogitsLoss(pos_weight=torch.ones(1))  # a buffer
        return self.loss(self.layer(x), x[:, :1])


class Shaped(nn.Module):
    """A module that has structured output and ignores its second argument."""

    def __init__(self, form: Callable[[torch.Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.layer, self._form = nn.Linear(3, 1), form

    def forward(self, x: torch.Tensor, ignored: object = None) -> Any:
        return self._form(self.layer(x))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def trained(
    wrap: Callable[..., nn.Module],
    make: Make = Network,
    change: Change = lambda module: None,
    value_of: Callable[[Any], torch.Tensor] = lambda output: output,
    arguments: Callable[[int], tuple[Any, ...]] = lambda step: (batch(step),),
    **options: Any,
) -> list[torch.Tensor]:
    """Returns the parameters after 20 steps; the module changes after three."""
    torch.manual_seed(1)
    model = wrap(make(), **options)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, 0.01)
    for step in range(20):
        if step == 3:
            change(model.module)
        optimizer.zero_grad()
        value_of(model(*arguments(step))).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in params]


def pruned(module: nn.Module) -> None:
    prune.l1_unstructured(module.first, "weight", 0.5)


def pruned_for_good(module: nn.Module) -> None:
    pruned(module)
    prune.remove(module.first, "weight")


def with_another_activation(module: nn.Module) -> None:
    module.activation = nn.GELU()


def with_compiled_layers(module: nn.Module) -> None:
    torch._dynamo.reset()
    module.first = torch.compile(module.first, backend="eager")
    module.norm = torch.compile(module.norm, backend="eager")


def with_a_layer_in_two_places(module: nn.Module) -> None:
    module.again, module.weight = module.first, module.last.weight


def with_a_frozen_parameter(module: nn.Module) -> None:
    module.scale = nn.Parameter(torch.ones(1), requires_grad=False)


def with_buffers(module: nn.Module) -> None:
    """Adds buffers that affect the output. They differ between ranks until rank 0's are copied to the other ranks."""
    module.register_buffer("factor", torch.tensor(1.0 + dist.get_rank()))
    module.shift = nn.Module()
    module.shift.register_buffer("values", torch.tensor([1.0 + dist.get_rank()]))
    forward = module.last.forward
    module.last.forward = lambda x: forward(x) * module.factor + module.shift.values


def without_its_last_layer(module: nn.Module) -> None:
    module.last = nn.Identity()


def in_itself(y: object) -> list[Any]:
    outer = [y]
    outer.append(outer)
    return outer


def mapped_to_itself() -> dict[str, Any]:
    outer: dict[str, Any] = {}
    outer["outer"] = outer
    return outer


def nested(layout: torch.layout, x: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([x[:1], x[1:]], layout=layout)


def padded(output: torch.Tensor) -> torch.Tensor:
    return torch.nested.to_padded_tensor(output, 0.0)


CHANGES = (
    pruned,
    pruned_for_good,
    with_another_activation,
    with_compiled_layers,
    with_a_layer_in_two_places,
    with_a_frozen_parameter,
    with_buffers,
)

TRAININGS: dict[str, dict[str, Any]] = {
    **{change.__name__: {"change": change} for change in CHANGES},
    "without_its_last_layer": {"change": without_its_last_layer, "find_unused_parameters": True},
    "a_criterion_made_on_first_use": {"make": Criterion},
    "a_list_that_contains_itself": {"make": Shaped, "arguments": lambda step: (batch(step), in_itself(1))},
    "a_dictionary_that_contains_itself": {"make": Shaped, "arguments": lambda step: (batch(step), mapped_to_itself())},
    "an_output_that_contains_itself": {"make": partial(Shaped, in_itself), "value_of": lambda output: output[0]},
    "scripted": {"make": lambda: torch.jit.script(Network())},
    "traced_before": {"make": lambda: torch.jit.trace(Network(), torch.ones(2, 3))},
    **{
        f"nested_{what}_of_layout_{layout}": options
        for layout in (torch.strided, torch.jagged)
        for what, options in {
            "inputs": {
                "make": Shaped,
                "arguments": lambda step, layout=layout: (nested(layout, batch(step)),),
                "value_of": padded,
            },
            "outputs": {"make": partial(Shaped, partial(nested, layout)), "value_of": padded},
        }.items()
    },
}


def training(name: str, wrap: Callable[..., nn.Module]) -> list[torch.Tensor]:
    return trained(wrap, **TRAININGS[name])


def tracing(wrap: Callable[..., nn.Module]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = wrap(Shaped())  # torch does not trace the broadcast of buffers
    traced = torch.jit.trace(model, torch.ones(2, 3))
    traced(batch(0)).sum().backward()
    return [traced(batch(1)).detach(), *(param.grad for param in model.parameters())]


def with_values(buffer: torch.Tensor) -> list[torch.Tensor]:
    """Returns the comparable contents of a buffer."""
    if buffer.is_meta:
        return []
    if buffer.dtype is torch.complex32:
        return [torch.view_as_real(buffer.resolve_conj()).float()]
    if buffer.is_nested:
        return [padded(buffer)]
    return [buffer.dequantize() if buffer.is_quantized else buffer.to_dense()]


BUFFERS: dict[str, Callable[[float], torch.Tensor]] = {
    "meta": lambda value: torch.zeros(2, device="meta"),
    "conjugate": lambda value: torch.tensor([value + 2j]).conj(),
    "negative": lambda value: torch._neg_view(torch.tensor([value])),
    "complex32": lambda value: torch.tensor([value + 2j], dtype=torch.complex32),
    "complex32_conjugate": lambda value: torch.tensor([value + 2j], dtype=torch.complex32).conj(),
    "csr": lambda value: (torch.eye(3) * value).to_sparse_csr(),
    "coo": lambda value: (torch.eye(3) * value).to_sparse(),
    "nested": lambda value: torch.nested.nested_tensor([torch.full((1,), value), torch.ones(2)]),
    "of_another_shape": lambda value: torch.ones(int(value)),
    "quantized": lambda value: torch.quantize_per_tensor(torch.full((3,), value), 0.1, 0, torch.quint8),
    "expanded": lambda value: torch.tensor([value]).expand(3),
}
SENT = ("meta", "negative", "complex32")  # kinds that torch sends over gloo; it leaves conjugates unchanged


def keeping(kind: str, is_sent: bool, wrap: Callable[..., nn.Module]) -> list[torch.Tensor]:
    """Returns the values of a buffer and the gradients of its module after two steps."""
    torch.manual_seed(1)
    module = nn.Linear(3, 1)
    module.register_buffer("kept", BUFFERS[kind](1.0 + dist.get_rank()))
    model = wrap(module, broadcast_buffers=is_sent)
    for step in range(2):
        model.zero_grad()
        model(batch(step)).sum().backward()
    return [*with_values(module.kept), *(param.grad for param in module.parameters())]


def half_complex(wrap: Callable[..., nn.Module]) -> list[torch.Tensor]:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2, dtype=torch.complex32))
    module.forward = lambda x: (module.weight * x).abs()
    model = wrap(module)
    model(torch.tensor(1.0 + dist.get_rank(), dtype=torch.half)).sum().backward()
    return [torch.view_as_real(module.weight.grad).float()]


PROGRAMS: dict[str, Callable[..., list[torch.Tensor]]] = {
    name_of(each): each
    for each in (
        *(partial(training, name) for name in TRAININGS),
        tracing,
        *(partial(keeping, kind, False) for kind in BUFFERS),
        *(partial(keeping, kind, True) for kind in SENT),
        half_complex,
    )
}


@contextmanager
def gloo_beside(file: str) -> Iterator[None]:
    import torch.distributed as gloo

    dist.init_process_group()
    size = dist.get_world_size()
    gloo.init_process_group("gloo", init_method=f"file://{file}", rank=dist.get_rank(), world_size=size)
    try:
        yield
    finally:
        gloo.destroy_process_group()


def agrees(program: Callable[..., list[torch.Tensor]], name: str) -> None:
    require_equal(
        program(dist.DistributedDataParallel), program(nn.parallel.DistributedDataParallel), tolerance=1e-5, at=name
    )


def all_beside_torchs(file: str) -> dict[str, str]:
    with gloo_beside(file):
        programs: dict[str, Program] = {name: partial(agrees, each, name) for name, each in PROGRAMS.items()}
        return run_in_turn(programs)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("beside") / "gloo"
    return merged(Ranks(2)(all_beside_torchs, str(file), timeout_s=110))


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_torch_accepts_ends_with_the_same_values(name: str, reports: dict[str, str]) -> None:
    require(reports, name)


def send_what_torch_does_not() -> None:
    dist.init_process_group()
    own = 1.0 + dist.get_rank()
    module = Network()
    module.register_buffer("single", BUFFERS["conjugate"](own))
    module.register_buffer("narrow", BUFFERS["complex32_conjugate"](own))
    wrapped = dist.DistributedDataParallel(module)
    module.single.real.fill_(3 * own)
    with torch.no_grad():
        module.narrow.copy_(BUFFERS["complex32_conjugate"](5 * own))
    traced = torch.jit.trace(wrapped, batch(0))
    assert module.single.tolist() == [3 - 2j]
    assert torch.view_as_real(module.narrow.resolve_conj()).tolist() == [[5, -2]]
    module.eval()
    expected = module(batch(1))
    module.train()
    assert traced(batch(1)).shape == expected.shape


def test_conjugate_buffers_are_sent_in_a_trace_too(ranks):
    ranks(2)(send_what_torch_does_not)


def refuse_buffers_that_cannot_be_sent() -> None:
    dist.init_process_group()
    for kind, told in (
        ("csr", "layout torch.sparse_csr"),
        ("coo", "layout torch.sparse_coo"),
        ("nested", "nested tensor"),
    ):
        module = nn.Linear(3, 1)
        module.register_buffer("kept", BUFFERS[kind](1.0))
        with pytest.raises(TypeError, match=f"the buffer 'kept' is a .*{told}.*; pass broadcast_buffers=False"):
            dist.DistributedDataParallel(module)
    module = nn.Linear(3, 1)
    module.tiny = nn.Parameter(torch.ones(1).to(torch.float8_e4m3fn))
    with pytest.raises(TypeError, match="parameter 'tiny' is of torch.float8_e4m3fn, which cannot be averaged"):
        dist.DistributedDataParallel(module)


def test_what_cannot_be_sent_or_averaged_is_refused(ranks):
    ranks(1)(refuse_buffers_that_cannot_be_sent)
