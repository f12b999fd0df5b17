"""DataParallel on several CPU devices: parts, replicas, threads, and gradients of the module itself."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import paceline as dist
from paceline.train.data_parallel import gather, parallel_apply, replicate, scatter

Pair = namedtuple("Pair", "left right")
TWO, THREE = ["cpu"] * 2, ["cpu"] * 3


@dataclass(frozen=True)
class Answer:
    logits: torch.Tensor
    extra: object = None


class Calls(nn.Module):
    def __init__(self, call: Callable[..., object]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self._call = call

    def forward(self, *args: object, **kwargs: object) -> object:
        return self._call(self.layer, *args, **kwargs)


class Outputs(nn.LSTM):
    """Outputs without the hidden states, whose batch dimension differs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]


NESTS = [
    lambda t: [t, 1],
    lambda t: (t, {"x": t + 1}),
    lambda t: OrderedDict(a=t, b=[t]),
    lambda t: Pair(t, None),
    lambda t: Answer(t, Answer(t, "name")),
]


@pytest.mark.parametrize("nest", NESTS)
def test_a_nest_is_cut_and_put_together_again(nest):
    whole = nest(torch.arange(10).view(5, 2))
    parts = scatter(whole, THREE)
    assert [type(part) for part in parts] == [type(whole)] * 3
    assert str(gather(parts, "cpu")) == str(whole)


@pytest.mark.parametrize(
    ("samples", "devices", "sizes"), [(5, 3, [2, 2, 1]), (2, 3, [1, 1]), (4, 3, [2, 2]), (0, 2, [0])]
)
def test_a_batch_is_cut_as_torchs_chunk_does(samples, devices, sizes):
    assert [len(part) for part in scatter(torch.ones(samples, 2), ["cpu"] * devices)] == sizes


def test_every_argument_has_the_same_number_of_parts():
    parts = scatter((torch.ones(2, 1), torch.ones(7, 1), torch.tensor(3.0), "all"), THREE)
    assert [(len(a), len(b), c.item(), d) for a, b, c, d in parts] == [(1, 4, 3, "all"), (1, 3, 3, "all")]


def packed_sequence() -> torch.nn.utils.rnn.PackedSequence:
    return nn.utils.rnn.pack_sequence([torch.ones(2, 4), torch.ones(5, 4)], enforce_sorted=False)


def test_a_packed_sequence_moves_without_its_batch_sizes():
    ((moved, number),) = scatter((packed_sequence(), 3), ["meta"])
    assert isinstance(moved, nn.utils.rnn.PackedSequence) and number == 3
    assert (moved.data.device.type, moved.sorted_indices.device.type, moved.batch_sizes.device.type) == (
        "meta",
        "meta",
        "cpu",
    )


def test_a_packed_sequence_is_not_divided_between_devices():
    with pytest.raises(TypeError, match="PackedSequence cannot be divided between 2 devices.*pack them in forward"):
        scatter((packed_sequence(), torch.ones(4)), TWO)


def test_another_dimension_can_be_the_batch():
    parts = scatter(torch.ones(2, 6), THREE, dim=1)
    assert [part.shape for part in parts] == [(2, 2)] * 3
    assert gather(parts, "cpu", dim=1).shape == (2, 6)


def test_losses_become_a_vector():
    assert gather([torch.tensor(1.0), torch.tensor(2.0)], "cpu").tolist() == [1, 2]


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        ([1, 2], r"different values of type int: 1, 2; only tensors can be concatenated"),
        ([torch.ones(1), None], r"outputs of the types NoneType and Tensor; forward must return the same type"),
        ([{"a": 1}, {"b": 1}], r"of type dict with different entries: \['a'\] and \['b'\]"),
    ],
)
def test_results_that_do_not_fit_together_are_told(outputs, told):
    with pytest.raises(TypeError, match=told):
        gather(outputs, "cpu")


def models() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    transformer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return {
        "mlp": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(5, 4)),
        "tied": (tied, torch.randn(5, 4)),
        "lstm": (Outputs(4, 3, 2, batch_first=True), torch.randn(5, 6, 4)),
        "transformer": (transformer, torch.randn(5, 6, 4)),
        "norm": (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), torch.randn(5, 4)),
    }


@pytest.mark.parametrize("kind", list(models()))
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_outputs_and_gradients_are_those_of_the_module_alone(kind, count):
    module, x = models()[kind]
    alone = copy.deepcopy(module)
    parallel = dist.DataParallel(module, ["cpu"] * count)
    outputs = [model(x) for model in (parallel, alone)]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1])
    for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    assert {f"module.{name}" for name in alone.state_dict()} == set(parallel.state_dict())


def test_keyword_arguments_and_any_kind_of_output_pass_through():
    def call(layer: nn.Module, x: torch.Tensor, *, scale: torch.Tensor, mode: str) -> Answer:
        assert mode == "sum" and len(scale) == len(x)
        return Answer(layer(x) * scale, {"mode": mode, "x": x})

    x, scale = torch.randn(5, 4), torch.randn(5, 1)
    module = Calls(call)
    answer = dist.DataParallel(module, THREE)(x, scale=scale, mode="sum")
    torch.testing.assert_close(answer.logits, module.layer(x) * scale)
    assert answer.extra["mode"] == "sum" and torch.equal(answer.extra["x"], x)


def test_training_ends_where_training_alone_does():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    alone = copy.deepcopy(module)
    for model in (dist.DataParallel(module, TWO), alone):
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for step in range(20):
            optimizer.zero_grad()
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
    for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_buffers_that_the_first_replica_writes_stay():
    module = nn.BatchNorm1d(4, momentum=1.0)
    x = torch.randn(6, 4)
    dist.DataParallel(module, TWO)(x)
    torch.testing.assert_close(module.running_mean, x[:3].mean(0))


def test_replicas_are_no_modules_with_parameters_of_their_own():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    replicas = replicate(module, TWO)
    assert [list(replica.parameters()) for replica in replicas] == [[], []]
    assert replicas[0][0] is not replicas[1][0] is not module[0]
    assert replicas[0][0].weight.grad_fn is not None
    assert replicate(module, TWO, detach=True)[0][0].weight.grad_fn is None


def test_threads_inherit_autocast_and_gradient_mode():
    seen = []

    def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        seen.append((y.dtype, torch.is_grad_enabled()))
        return y

    model = dist.DataParallel(Calls(call), TWO)
    model(torch.ones(2, 4))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert not model(torch.ones(2, 4)).requires_grad
    assert seen == [(torch.float32, True)] * 2 + [(torch.bfloat16, False)] * 2


def test_an_exception_names_the_replica_and_its_device():
    def fail(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] == 1:
            raise KeyError("mine")
        return layer(x)

    x = torch.zeros(2, 4)
    x[1] = 1
    with pytest.raises(KeyError, match=r"(?s)in replica 1 on device cpu.*Original Traceback.*in fail.*mine"):
        dist.DataParallel(Calls(fail), TWO)(x)


def test_wrong_numbers_and_places_are_told():
    with pytest.raises(
        ValueError, match="2 modules, 1 inputs, 2 kwargs_tup and 2 devices; it needs the same number of each"
    ):
        parallel_apply([nn.Identity(), nn.Identity()], [torch.ones(1)])
    model = dist.DataParallel(nn.Linear(2, 2).to("meta"), TWO)
    with pytest.raises(RuntimeError, match=r"'weight' is on meta, and device_ids begins with cpu: module\.to_empty"):
        model(torch.ones(2, 2))


def test_without_devices_the_module_is_called_as_it_is():
    module = Calls(lambda layer, x: x)
    x = torch.ones(2)
    assert dist.DataParallel(module, [])(x) is x
    assert torch.equal(dist.data_parallel(module, x, TWO), x)


@pytest.mark.skipif(torch.accelerator.device_count() > 0, reason="this machine has a GPU")
@pytest.mark.parametrize("arguments", [{"device_ids": [0]}, {"device_ids": ["cuda"], "output_device": 1}])
def test_gpus_are_ignored_like_torchs_on_a_machine_without_any(arguments):
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    assert dist.DataParallel(layer, **arguments)(x).equal(nn.DataParallel(layer, **arguments)(x))
    with pytest.raises(ValueError, match=r"output_device contains cuda:0 .*this process sees no GPU"):
        dist.DataParallel(layer, ["cpu"], output_device=0)
