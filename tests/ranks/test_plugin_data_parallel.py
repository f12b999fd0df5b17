"""PyTorch's own data parallelism over the backend "paceline": each program trains as it does over gloo."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_programs import Comparison

Result = list[torch.Tensor]


def network(normalization: type[nn.Module] = nn.BatchNorm1d) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), normalization(64), nn.Linear(64, 33), nn.ReLU(), nn.Linear(33, 5)
    )


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + torch_dist.get_rank())
    inputs = torch.randn(8, 20, generator=generator)
    return inputs.to(dtype), torch.randint(0, 5, (8,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> Result:
    losses = []
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).float(), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def ddp(options: dict[str, bool | float], hook: str = "none") -> Result:
    model = DistributedDataParallel(network(), **options)
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "C++ all-reduce":
        model._register_builtin_comm_hook(torch_dist.BuiltinCommHookType.ALLREDUCE)
    elif hook == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "local SGD":
        state = post_localSGD_hook.PostLocalSGDState(
            None, torch_dist.new_subgroups(group_size=1)[0], start_localSGD_iter=2
        )
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return [*train(model, torch.optim.SGD(model.parameters(), 0.1)), *model.state_dict().values()]


def ddp_with_uneven_inputs(divide_by_initial_world_size: bool) -> Result:
    model = DistributedDataParallel(nn.Linear(20, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for step in range(2 + torch_dist.get_rank()):
            optimizer.zero_grad()
            model(batch(step)[0]).sum().backward()
            optimizer.step()
    return list(model.state_dict().values())


def unused_parameters() -> Result:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(20, 5), nn.Linear(20, 5)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return (self.first if torch_dist.get_rank() else self.second)(inputs)

    torch.manual_seed(7)
    model = DistributedDataParallel(Chooses(), find_unused_parameters=True)
    return [*train(model, torch.optim.SGD(model.parameters(), 0.1)), *model.state_dict().values()]


def no_sync() -> Result:
    model = DistributedDataParallel(network())
    with model.no_sync():
        model(batch(0)[0]).sum().backward()
    model(batch(1)[0]).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def zero() -> Result:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow, and only this test needs it

    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    losses = train(model, optimizer)
    with Join([model, optimizer]):
        for step in range(1 + torch_dist.get_rank()):
            optimizer.zero_grad()
            model(batch(step)[0]).sum().backward()
            optimizer.step()
    optimizer.consolidate_state_dict(0)
    state = optimizer.state_dict()["state"] if torch_dist.get_rank() == 0 else {}
    return [*losses, *model.parameters(), *(moments["exp_avg"] for moments in state.values())]


def fsdp1() -> Result:
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)
    losses = train(model, torch.optim.Adam(model.parameters(), 0.01))
    model.clip_grad_norm_(0.1)
    with FullyShardedDataParallel.summon_full_params(model):
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def fsdp2(half: bool = False, hybrid: bool = False) -> Result:
    size = torch_dist.get_world_size()
    shape, names = ((2, size // 2), ("replicate", "shard")) if hybrid else ((size,), ("shard",))
    mesh = torch_dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = network(nn.LayerNorm if half else nn.BatchNorm1d)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    losses = train(model, torch.optim.Adam(model.parameters(), 0.01))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    return [*losses, norm, *(parameter.full_tensor().detach() for parameter in model.parameters())]


HAS_FSDP2 = torch.__version__ >= (2, 7)  # before 2.7, `fully_shard` requires an accelerator
OPTIONS = [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001}]
PROGRAMS = [
    *(partial(ddp, options) for options in OPTIONS),
    *(partial(ddp_with_uneven_inputs, at_first) for at_first in (True, False)),
    *(unused_parameters, no_sync, zero, fsdp1),
    *([fsdp2] if HAS_FSDP2 else []),
]
WORLDS = {
    2: Comparison(
        *PROGRAMS,
        *([partial(fsdp2, True)] if HAS_FSDP2 else []),
        *(partial(ddp, {}, hook) for hook in ("fp16", "C++ all-reduce", "PowerSGD", "local SGD")),
    ),
    3: Comparison(*PROGRAMS),
    4: Comparison(*([partial(fsdp2, False, True)] if HAS_FSDP2 else [])),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("size", "program"), [(size, program) for size, world in WORLDS.items() for program in world.programs]
)
def test_training_agrees_with_gloo(size, program):
    WORLDS[size].require(size, program)
