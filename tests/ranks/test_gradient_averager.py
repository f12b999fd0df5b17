"""DistributedDataParallel in unusual cases: the gradients are correct, or an error explains why they are not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline as dist

TINY_BUCKETS = {"bucket_cap_mb": 1e-5, "overlap": True}  # one bucket per parameter, reduced during the backward pass


def inputs(*shape: int) -> list[torch.Tensor]:
    """Returns the batches of all ranks."""
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(r)) for r in range(dist.get_world_size())]


def mlp(depth: int = 3, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


def require_equal_on_all_ranks(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)


def require_averaged(
    module: nn.Module, reference: nn.Module, losses: Callable[[nn.Module], Iterable[torch.Tensor]]
) -> None:
    """Asserts that gradients are the average of those from `losses(reference)`, which yields one loss per rank."""
    size = dist.get_world_size()
    sums: dict[str, torch.Tensor] = {}
    for loss in losses(reference):
        reference.zero_grad()  # added here, because autograd adds incorrectly if two gradients share memory
        loss.backward()
        for name, param in reference.named_parameters():
            if param.grad is not None:
                sums[name] = sums.get(name, torch.zeros_like(param)) + param.grad
    for name, param in module.named_parameters():
        assert (param.grad is None) == (name not in sums), name
        if param.grad is not None:
            torch.testing.assert_close(
                param.grad, sums[name] / size, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    require_equal_on_all_ranks(param.grad for param in module.parameters() if param.grad is not None)


class Plus(nn.Module):
    """With one sample, the gradient of `x` shares memory with the parameter's gradient."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.terms = nn.ParameterList(torch.randn(16, 64) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for term in self.terms:
            x = x + term.unsqueeze(0)
        return x


def gradients_in_shared_memory() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), Plus())
    reference = copy.deepcopy(module)
    wrapped = dist.DistributedDataParallel(module, bucket_cap_mb=0.001, overlap=True)
    batches = inputs(1, 16, 64)
    for _ in range(5):
        module.zero_grad()
        wrapped(batches[rank]).square().sum().backward()
        require_averaged(module, reference, lambda m: [m(x).square().sum() for x in batches])


def test_a_gradient_that_other_layers_still_read_is_not_changed(ranks):
    ranks(2)(gradients_in_shared_memory)


def one_memory_on_one_rank(overlap: bool) -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = nn.Sequential(Plus(2), nn.Linear(64, 64))
    reference = copy.deepcopy(module)
    wrapped = dist.DistributedDataParallel(module, overlap=overlap, bucket_cap_mb=0.001)
    batches = [x.expand(1 + at, 16, 64) for at, x in enumerate(inputs(1, 16, 64))]  # only rank 0 has a single sample
    wrapped(batches[rank]).square().sum().backward()
    require_averaged(module, reference, lambda m: [m(x).square().sum() for x in batches])


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_that_share_memory_on_one_rank_are_averaged(ranks, overlap):
    ranks(2)(one_memory_on_one_rank, overlap)


class Prompted(nn.Module):
    """A module in which the gradient of `prompt` is a slice of the gradient of `positions`, with an offset."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.randn(16, 64))
        self.positions = nn.Parameter(torch.randn(48, 64))
        self.prompt = nn.Parameter(torch.randn(32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([self.first.unsqueeze(0), self.prompt.unsqueeze(0)], dim=1)
        return (tokens + self.positions.unsqueeze(0)) * x


def a_part_of_another_gradient() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = Prompted()
    reference = copy.deepcopy(module)
    wrapped = dist.DistributedDataParallel(module, overlap=False)
    batches = inputs(48, 64)
    reference(batches[0]).sum().backward()
    a, b = (param.grad.untyped_storage().data_ptr() for param in reference.parameters())
    assert a == b  # the difficult case
    wrapped(batches[rank]).square().sum().backward()
    require_averaged(module, reference, lambda m: [m(x).square().sum() for x in batches])


def test_a_gradient_that_is_a_part_of_another_is_averaged_once(ranks):
    ranks(2)(a_part_of_another_gradient)


def gradients_of_inputs() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    module = Plus()
    wrapped = dist.DistributedDataParallel(module)
    x = inputs(16, 64)[rank].requires_grad_()

    def backward_of(model: nn.Module) -> None:
        (model(x.unsqueeze(0)) * (rank + 1)).sum().backward()

    backward_of(module)
    assert x.grad.data_ptr() == module.terms[0].grad.data_ptr()  # the difficult case
    x.grad = None
    module.zero_grad()
    backward_of(wrapped)
    assert (x.grad == rank + 1).all()
    assert (module.terms[0].grad == 1.5).all()


def test_the_gradient_of_an_input_stays_this_ranks_own(ranks):
    ranks(2)(gradients_of_inputs)


def several_backwards() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    for options in ({}, TINY_BUCKETS, {"find_unused_parameters": True}):
        batches, others = inputs(4, 8), [x + 1 for x in inputs(4, 8)]

        module, reference = mlp(), mlp()
        wrapped = dist.DistributedDataParallel(module, **options)
        loss = wrapped(batches[rank]).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        require_averaged(module, reference, lambda m, b=batches: [2 * m(x).sum() for x in b])

        module, reference = mlp(), mlp()
        wrapped = dist.DistributedDataParallel(module, **options)
        real, fake = wrapped(batches[rank]).sum(), wrapped(others[rank]).sum()
        real.backward()
        fake.backward()
        require_averaged(module, reference, lambda m, b=batches: [m(x).sum() + m(x + 1).sum() for x in b])

        module.zero_grad()
        (wrapped(batches[rank]) * wrapped(others[rank])).sum().backward()
        require_averaged(module, reference, lambda m, b=batches: [(m(x) * m(x + 1)).sum() for x in b])


def test_every_backward_of_a_forward_that_syncs_is_averaged(ranks):
    ranks(2)(several_backwards)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = mlp(), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x)
        return self.left(h), self.right(h)


def losses_one_by_one() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    for set_to_none in (True, False):
        for options in ({}, TINY_BUCKETS):
            module = Heads()
            reference = copy.deepcopy(module)
            wrapped = dist.DistributedDataParallel(module, **options)
            reference.load_state_dict(module.state_dict())
            batches = inputs(4, 8)
            for _ in range(2):
                module.zero_grad(set_to_none)
                left, right = wrapped(batches[rank])
                right.sum().backward(retain_graph=True)
                left.sum().backward()
                require_averaged(module, reference, lambda m, b=batches: [sum(y.sum() for y in m(x)) for x in b])


def test_losses_may_come_one_backward_after_the_other(ranks):
    ranks(2)(losses_one_by_one)


class Checkpointed(nn.Module):
    """Uses a layer three times, each time with a separate checkpointed graph."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.again, self.last = mlp(1), mlp(1), mlp(1)
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(self.again, x, use_reentrant=self._reentrant)
        return self.last(x)


def train_checkpointed_layers() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    batches = inputs(4, 8)
    for reentrant, options in (
        (False, TINY_BUCKETS),
        (True, {}),
        (True, {"static_graph": True}),
        (True, {"static_graph": True, **TINY_BUCKETS}),
    ):
        module = Checkpointed(reentrant)
        reference = copy.deepcopy(module)
        wrapped = dist.DistributedDataParallel(module, **options)
        for _ in range(3):
            module.zero_grad()
            wrapped(batches[rank]).sum().backward()
            require_averaged(module, reference, lambda m: [m(x).sum() for x in batches])
    wrapped = dist.DistributedDataParallel(Checkpointed(reentrant=True), **TINY_BUCKETS)
    with pytest.raises(RuntimeError, match=r"'again\..*' got another gradient.*static_graph=True"):
        wrapped(batches[rank]).sum().backward()
    with pytest.raises(RuntimeError, match="the last backward ended with an error before its gradients were averaged"):
        wrapped(batches[rank])


def test_checkpointed_layers_are_averaged_or_told(ranks):
    ranks(2)(train_checkpointed_layers)


class Choice(nn.Module):
    """Every rank uses a different layer, and no rank uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(dist.get_world_size() + 1))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.head(self.layers[chosen](x))


def unused_in_a_static_graph() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    batches = inputs(4, 8)
    for options in ({}, TINY_BUCKETS):
        torch.manual_seed(0)
        module = Choice()
        reference = copy.deepcopy(module)
        wrapped = dist.DistributedDataParallel(module, static_graph=True, **options)
        for _ in range(3):
            module.zero_grad()
            wrapped(batches[rank], rank).sum().backward()
            require_averaged(module, reference, lambda m: [m(x, r).sum() for r, x in enumerate(batches)])
        module.zero_grad()

        def go_another_way(wrapped: nn.Module = wrapped, other: int = len(module.layers) - 1) -> None:
            wrapped(batches[rank], other).sum().backward()
            wrapped(batches[rank], other)

        with pytest.raises(RuntimeError, match="static_graph=True requires that all backward passes are the same"):
            go_another_way()


def test_a_static_graph_may_use_other_parameters_on_each_rank(ranks):
    ranks(2)(unused_in_a_static_graph)


@dataclass
class Answer:
    logits: torch.Tensor


class Opaque:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Returns(nn.Module):
    def __init__(self, wrap: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.body = mlp()
        self._wrap = wrap

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> object:
        return self._wrap(self.body(x) * scale)


def return_outputs_of_any_kind() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    batches = inputs(4, 8)
    for wrap, unwrap in (
        (lambda y: {"a": [y]}, lambda out: out["a"][0]),
        (Answer, lambda out: out.logits),
        (Opaque, lambda out: out.logits),
    ):
        for options in ({}, TINY_BUCKETS, {"find_unused_parameters": True}):
            module = Returns(wrap)
            reference = copy.deepcopy(module)
            wrapped = dist.DistributedDataParallel(module, **options)
            unwrap(wrapped(batches[rank], scale=2.0)).sum().backward()
            require_averaged(module, reference, lambda m, u=unwrap: [u(m(x, scale=2.0)).sum() for x in batches])


def test_outputs_may_be_of_any_kind_even_out_of_sight(ranks):
    ranks(2)(return_outputs_of_any_kind)


class Calls(nn.Module):
    def __init__(self, call: Callable[[nn.Module, object], torch.Tensor]) -> None:
        super().__init__()
        self._call = call

    def forward(self, x: object) -> torch.Tensor:
        return self._call(self, x)


def gradients_of_any_layout() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    reference = copy.deepcopy(conv)
    wrapped = dist.DistributedDataParallel(conv)
    reference.load_state_dict(conv.state_dict())
    if rank == 0:  # on rank 1, autograd creates it in channels-last format
        conv.weight.grad = torch.zeros(4, 3, 3, 3)
    batches = inputs(2, 3, 8, 8)
    wrapped(batches[rank]).sum().backward()
    require_averaged(conv, reference, lambda m: [m(x).sum() for x in batches])


def test_gradients_of_any_layout_are_averaged(ranks):
    ranks(2)(gradients_of_any_layout)


def gradients_of_several_types() -> None:
    dist.init_process_group()
    types = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    mixed = Calls(lambda m, scale: sum((p.conj() * scale).abs().sum().double() for p in m.params))
    mixed.params = nn.ParameterList(torch.ones(5, dtype=types[at % 4]) for at in range(12))
    mixed.params.append(torch.ones(5, dtype=torch.complex64))
    wrapped = dist.DistributedDataParallel(mixed, **TINY_BUCKETS)
    wrapped(float(dist.get_rank())).backward()
    assert all((param.grad == 0.5).all() for param in mixed.params)


def test_gradients_of_several_types_are_averaged(ranks):
    ranks(2)(gradients_of_several_types)


def sparse_gradients() -> None:
    dist.init_process_group()
    sparse = Calls(lambda m, x: nn.functional.embedding(x, m.table, sparse=True).sum())
    sparse.table = nn.Parameter(torch.ones(4, 2))
    wrapped = dist.DistributedDataParallel(sparse)
    with pytest.raises(TypeError, match=r"'table'.*sparse_coo.*sparse=False"):
        wrapped(torch.tensor([1])).backward()


def test_sparse_gradients_are_refused_with_the_fix(ranks):
    ranks(2)(sparse_gradients)


def errors_of_the_users() -> None:
    dist.init_process_group()
    wrapped = dist.DistributedDataParallel(mlp(), **TINY_BUCKETS)

    def fail(_: torch.Tensor) -> None:
        raise KeyError("mine")

    hook = wrapped.module[2].weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        wrapped(torch.ones(1, 8)).sum().backward()
    hook.remove()
    with pytest.raises(RuntimeError, match="the last backward ended with an error before its gradients were averaged"):
        wrapped(torch.ones(1, 8))


def test_an_error_in_backward_reaches_the_user_unchanged(ranks):
    ranks(2)(errors_of_the_users)
