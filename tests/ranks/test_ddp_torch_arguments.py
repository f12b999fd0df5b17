"""The arguments and attributes of torch's DistributedDataParallel have the same meaning in Paceline's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from torch.nn.parallel.distributed import _MixedPrecision
from torch_programs import torch_group
from training import batches, mlp, require_equal_on_all_ranks

import paceline as dist

TORCHS = list(inspect.signature(TorchDdp).parameters)
Options = Callable[[nn.Module], dict[str, object]]


def test_torchs_positional_arguments_come_in_its_order():
    ours = inspect.signature(dist.DistributedDataParallel).parameters
    positional = [name for name, each in ours.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert [name for name in positional if name in TORCHS] == TORCHS


class Net(nn.Module):
    """A network with buffers that differ between ranks, and with an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("own", torch.full((3,), float(dist.get_rank())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def delayed(module: nn.Module) -> dict[str, object]:
    named = [(name, param) for name, param in module.named_parameters() if name.startswith("last")]
    return {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": module.first.weight}


def train(wrap: Callable[..., nn.Module], options: Options) -> dict[str, torch.Tensor]:
    """Trains a model for three steps; returns its parameters, gradients and buffers."""
    module = Net()
    wrapped = wrap(module, find_unused_parameters=True, **options(module))
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        wrapped(batches(4, 8, step=step)[dist.get_rank()]).square().mean().backward()
        torch.distributed.barrier()  # delayed gradients must arrive first; torch's DDP does not wait for them
        optimizer.step()
    values = {name: value.detach().clone() for name, value in module.state_dict().items()}
    values |= {f"{name}.grad": p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return values


def compare_with_torch(directory: str) -> None:
    dist.init_process_group()
    every: dict[str, Options] = {
        "forward_sync_buffers": lambda m: {"forward_sync_buffers": False},
        "broadcast_buffers": lambda m: {"broadcast_buffers": False},
        "skip_all_reduce_unused_params": lambda m: {"skip_all_reduce_unused_params": True},
        "batched_grad_copy": lambda m: {"batched_grad_copy": True},
        "lazy_bucket_allocation": lambda m: {"lazy_bucket_allocation": True},
        "bucket_cap_mb_list": lambda m: {"bucket_cap_mb_list": [0.0001, 0.0003]},
        "device_mesh": lambda m: {"device_mesh": init_device_mesh("cpu", (2,))},
        "delay_all_reduce_named_params": delayed,
    }
    with torch_group("gloo", directory):
        for name, options in every.items():
            if name in TORCHS:
                theirs, ours = train(TorchDdp, options), train(dist.DistributedDataParallel, options)
                assert theirs.keys() == ours.keys(), name
                for key, value in theirs.items():
                    torch.testing.assert_close(ours[key], value, msg=lambda m, w=(name, key): f"{w}: {m}")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_each_argument_trains_as_torchs_does(ranks, tmp_path):
    ranks(2)(compare_with_torch, str(tmp_path))


def all_delayed() -> None:
    dist.init_process_group()
    module = mlp()
    alone = copy.deepcopy(module)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(dist.get_rank())
    named = list(module.named_parameters())
    wrapped = dist.DistributedDataParallel(
        module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=module[0].weight
    )
    require_equal_on_all_ranks(module.parameters())  # copied from rank 0
    wrapped(batches(4, 8)[dist.get_rank()]).sum().backward()
    for x in batches(4, 8):
        (alone(x).sum() / 2).backward()
    for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    with pytest.raises(ValueError, match="Join got a module that was wrapped with delay_all_reduce_named_params"):
        wrapped.join()


def test_all_parameters_may_be_delayed(ranks):
    ranks(2)(all_delayed)


def refuse_bad_arguments() -> None:
    dist.init_process_group()
    wrap, module = dist.DistributedDataParallel, nn.Linear(2, 2)
    named = list(module.named_parameters())
    with pytest.raises(ValueError, match="must be given together"):
        wrap(module, delay_all_reduce_named_params=named)
    with pytest.raises(ValueError, match="a pair of 'other' and a parameter that is not the module's"):
        wrap(module, delay_all_reduce_named_params=[("other", module.bias)], param_to_hook_all_reduce=module.weight)
    with pytest.raises(ValueError, match="param_to_hook_all_reduce requires no gradient"):
        frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        wrap(module, delay_all_reduce_named_params=named[1:], param_to_hook_all_reduce=frozen)
    with pytest.raises(ValueError, match=r"does not cast the module. Run forward under torch\.autocast\(device_type, "):
        wrap(module, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="bucket_cap_mb_list is -1; it must be positive"):
        wrap(module, bucket_cap_mb_list=[1, -1])
    with pytest.warns(FutureWarning, match="broadcast_buffers=False is ignored, because forward_sync_buffers=True"):
        assert wrap(module, broadcast_buffers=False, forward_sync_buffers=True).broadcast_buffers


def test_arguments_that_do_not_fit_are_refused(ranks):
    ranks(1)(refuse_bad_arguments)


def other_meshes(directory: str) -> None:
    dist.init_process_group()
    with torch_group("gloo", directory):
        square, half = init_device_mesh("cpu", (1, 2)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
        with pytest.raises(RuntimeError, match="process_group and device_mesh were both given"):
            dist.DistributedDataParallel(nn.Linear(2, 2), None, None, 0, None, True, dist.group.WORLD, device_mesh=half)
        with pytest.raises(RuntimeError, match="device_mesh has 2 dimensions"):
            dist.DistributedDataParallel(nn.Linear(2, 2), device_mesh=square)
        with pytest.raises(ValueError, match=rf"process_group=paceline\.new_group\(\[{dist.get_rank()}\]\) instead"):
            dist.DistributedDataParallel(nn.Linear(2, 2), device_mesh=half)


def test_meshes_of_other_ranks_are_refused(ranks, tmp_path):
    ranks(2)(other_meshes, str(tmp_path))


def half_precision() -> None:
    dist.init_process_group()
    module = mlp()
    expected = copy.deepcopy(module)
    wrapped = dist.DistributedDataParallel(module, mixed_precision=_MixedPrecision(reduce_dtype=torch.bfloat16))
    for model in (wrapped, copy.deepcopy(wrapped)):
        model.zero_grad()
        expected.zero_grad()
        model(batches(4, 8)[dist.get_rank()]).sum().backward()
        for x in batches(4, 8):
            (expected(x).sum() / 2).backward()
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert mine.grad.dtype == torch.float32
            assert torch.equal(mine.grad, mine.grad.bfloat16().float())  # the gradient was sent as bfloat16
            torch.testing.assert_close(mine.grad, other.grad, rtol=0.02, atol=0.02)


def test_gradients_are_averaged_in_the_reduce_dtype(ranks):
    ranks(2)(half_precision)


def read_attributes() -> None:
    dist.init_process_group()
    wrapped = dist.DistributedDataParallel(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), find_unused_parameters=True
    )
    assert wrapped.will_sync_module_buffers()
    wrapped.eval()
    assert not wrapped.will_sync_module_buffers()
    assert set(wrapped.named_module_buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert len(wrapped.modules_buffers) == 3 and wrapped.parameters_to_ignore == set()
    assert wrapped.device == torch.device("cpu") and wrapped.device_type == "cpu"
    assert not wrapped.is_multi_device_module
    with wrapped.no_sync():
        assert not wrapped.require_forward_param_sync
    data = wrapped._get_ddp_logging_data()
    assert data["module_name"] == "Sequential" and data["world_size"] == 1 and data["bucket_sizes"] == "40"
    assert data["num_parameter_tensors"] == 4 and data["find_unused_parameters"] == 1 and data["dtypes"] == "float32"
    assert not hasattr(wrapped, "reducer")
    with pytest.raises(AttributeError, match=r"no attribute 'reducer': no torch Reducer exists; use no_sync\(\)"):
        wrapped.reducer.prepare_for_backward([])
    with pytest.raises(AttributeError, match="object has no attribute 'other'"):
        _ = wrapped.other


def test_attributes_that_programs_read_are_there(ranks):
    ranks(1)(read_attributes)
