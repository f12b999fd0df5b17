"""Pipelines on real processes, compared with the same model in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import paceline as dist
from paceline.errors import CheckpointError

LAYERS = 9


class Residual(nn.Module):
    """Passes two activations to the next stage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, skipped: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.layer(x)), x if skipped is None else x + skipped


class Joined(nn.Module):
    def forward(self, x: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        return x + skipped


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(6, 16), *(Residual(16) for _ in range(LAYERS - 3)), Joined(), nn.Linear(16, 4)]
    return nn.Sequential(*layers).double()


def transformer() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(LAYERS - 3)]
    return nn.Sequential(nn.Embedding(11, 16), *layers, nn.Flatten(), nn.Linear(80, 4)).double()


MODELS: dict[str, Callable[[], nn.Sequential]] = {"mlp": mlp, "transformer": transformer}


def batch(kind: str, step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    if kind == "transformer":
        inputs = torch.randint(0, 11, (samples, 5), generator=generator)
    else:
        inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 4, (samples,), generator=generator)


def whole(layers: nn.Sequential, inputs: torch.Tensor) -> torch.Tensor:
    value: tuple[torch.Tensor, ...] = (inputs,)
    for layer in layers:
        output = layer(*value)
        value = output if isinstance(output, tuple) else (output,)
    return value[0]


def require_equal(mine: nn.Module, reference: nn.Module, what: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    theirs = dict(reference.named_parameters())
    for name, parameter in mine.named_parameters():
        torch.testing.assert_close(what(parameter), what(theirs[name]), rtol=1e-10, atol=1e-10)


def like_the_whole(kind: str, schedule: str, micro_batches: int, samples: int) -> None:
    dist.init_process_group()
    stages_per_rank = 2 if schedule == "interleaved" else 1
    model = MODELS[kind]()
    reference = copy.deepcopy(model)
    loss = nn.functional.cross_entropy
    pipeline = dist.Pipeline(
        model, loss, micro_batches=micro_batches, schedule=schedule, stages_per_rank=stages_per_rank
    )
    assert len(list(pipeline.children())) < LAYERS
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (pipeline, reference)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(2):  # gradients of two batches are added up
            inputs, targets = batch(kind, 2 * step + part, samples + step % 2)
            expected = loss(whole(reference, inputs), targets)
            expected.backward()
            mean = pipeline.step(inputs if pipeline.is_first else None, targets if pipeline.is_last else None)
            torch.testing.assert_close(mean.double(), expected.detach(), rtol=1e-6, atol=1e-6)
        require_equal(pipeline, reference, lambda parameter: parameter.grad)
        for optimizer in optimizers:
            optimizer.step()
    require_equal(pipeline, reference, lambda parameter: parameter.detach())

    inputs, _ = batch(kind, 99, samples)
    output = pipeline(inputs)
    assert (output is None) != pipeline.is_last
    if output is not None:
        torch.testing.assert_close(output, whole(reference, inputs).detach(), rtol=1e-10, atol=1e-10)
    assert set(pipeline.state_dict()) <= set(reference.state_dict())


@pytest.mark.parametrize(
    ("kind", "schedule", "micro_batches", "samples"),
    [
        ("mlp", "gpipe", 3, 12),
        ("mlp", "1f1b", 8, 21),
        ("transformer", "interleaved", 4, 11),
        ("transformer", "zero_bubble", 5, 13),
    ],
)
def test_a_pipeline_trains_like_the_whole_model(ranks, kind, schedule, micro_batches, samples):
    ranks(2)(like_the_whole, kind, schedule, micro_batches, samples)


def test_four_stages_train_like_the_whole_model(ranks):
    ranks(4)(like_the_whole, "mlp", "zero_bubble", 8, 16)


def with_replicas() -> None:
    dist.init_process_group()
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model, loss = mlp(), nn.functional.cross_entropy
    reference = copy.deepcopy(model)
    groups = {"group": mesh.get_group("pp"), "data_parallel_group": mesh.get_group("dp")}
    pipeline = dist.Pipeline(model, loss, micro_batches=4, split=[3, LAYERS - 3], **groups)
    inputs, targets = batch("mlp", 0, 16)
    own = slice(8 * mesh.get_local_rank("dp"), 8 * mesh.get_local_rank("dp") + 8)
    mean = pipeline.step(inputs[own], targets[own])
    loss(whole(reference, inputs), targets).backward()
    require_equal(pipeline, reference, lambda parameter: parameter.grad)
    expected = loss(whole(reference, inputs[own]), targets[own]).item()
    assert mean.item() == pytest.approx(expected, rel=1e-5)

    norm = dist.clip_grad_norm_(pipeline.parameters(), 0.1, pipeline_group=mesh.get_group("pp"))
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    require_equal(pipeline, reference, lambda parameter: parameter.grad)


def test_replicas_of_a_pipeline_average_their_gradients(ranks):
    ranks(4)(with_replicas)


def what_is_refused(directory: str) -> None:
    dist.init_process_group()
    model = mlp()
    pipeline = dist.Pipeline(model, nn.functional.cross_entropy, micro_batches=4)
    inputs, targets = batch("mlp", 0, 8)
    for arguments, text in (
        ((None, targets), "the inputs on rank 0, which has the first stage, are missing"),
        ((inputs, targets[:7]), "rank 0 passes inputs of 8 samples, and rank 1 targets of 7"),
        ((inputs[:3], targets[:3]), "3 samples cannot be divided into 4 micro-batches"),
        (((inputs, inputs[:5]), targets), "not tensors with the same number of samples"),
    ):
        with pytest.raises(ValueError, match=text):
            pipeline.step(*arguments)
    assert pipeline.step(inputs, targets).item() > 0, "it goes on"

    shared = dist.LogicalShards(mlp(), 2)
    shared.module = pipeline
    with pytest.raises(CheckpointError, match="each of its ranks computes the whole model"):
        dist.save({"model": shared}, directory)

    tied = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="belongs to stage 1 and to stage 0; stages can be on different ranks"):
        dist.Pipeline([tied, nn.ReLU(), tied], nn.functional.mse_loss, micro_batches=2, split=[2, 1])
    with pytest.raises(ValueError, match="1 layers for 2 stages"):
        dist.Pipeline([tied], nn.functional.mse_loss, micro_batches=2)
    with pytest.raises(ValueError, match=r"split=\[3, 3\] must be 2 numbers .* whose sum is 9"):
        dist.Pipeline(mlp(), nn.functional.mse_loss, micro_batches=2, split=[3, 3])


def test_bad_batches_and_models_are_refused_on_all_ranks(ranks, tmp_path):
    ranks(2)(what_is_refused, str(tmp_path))
