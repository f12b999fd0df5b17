"""ZeroRedundancyOptimizer, compared with the same optimizer on every rank and with torch's."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable

import pytest
import torch
from torch import nn

import paceline as dist
from paceline.train.zero.optimizer_state import gather_state

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, object]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.encoder(self.embed(x)) @ self.embed.weight.t()).mean(1)  # the embedding is used twice


def build(kind: str) -> nn.Module:
    torch.manual_seed(dist.get_rank())  # wrapping must make them the same
    if kind == "transformer":
        return Transformer()
    if kind == "cnn":
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 20)).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 20))


def batch(kind: str, step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    target = torch.randint(0, 20, (6,), generator=generator)
    if kind == "transformer":
        return torch.randint(0, 20, (6, 5), generator=generator), target
    return torch.randn((6, 1, 8, 8) if kind == "cnn" else (6, 8), generator=generator), target


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, kind: str = "mlp", steps: int = 20, first: int = 0
) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        x, target = batch(kind, step)
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def unsharded(model: nn.Module, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = dist.DistributedDataParallel(model)
    optimizer_class, options = OPTIMIZERS[name]
    return wrapped, optimizer_class(wrapped.parameters(), **options)


def require_close(mine: object, other: object) -> None:
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


def like_unsharded(names: list[str], stages: list[int], wrap: bool, overlap: bool) -> None:
    dist.init_process_group()
    for kind in ("mlp", "cnn", "transformer"):
        for name in names:
            optimizer_class, options = OPTIMIZERS[name]
            reference, optimizer = unsharded(build(kind), name)
            expected = train(reference, optimizer, kind)
            for stage in stages:
                model = dist.DistributedDataParallel(build(kind)) if wrap else build(kind)
                sharded = dist.ZeroRedundancyOptimizer(
                    model, optimizer_class, stage=stage, overlap=overlap, bucket_cap_mb=0.004, **options
                )
                require_close(train(model, sharded, kind), expected)
                with sharded.full_parameters():
                    plain = model.module if wrap else model
                    for mine, other in zip(plain.parameters(), reference.module.parameters(), strict=True):
                        require_close(mine, other)


@pytest.mark.parametrize(("size", "names"), [(2, ["SGD", "AdamW"]), (3, ["Adam"])])
def test_twenty_steps_end_where_the_unsharded_optimizers_do(ranks, size, names):
    ranks(size)(like_unsharded, names, [1, 2, 3], False, False)


@pytest.mark.parametrize(("stages", "overlap"), [([1], False), ([2, 3], True)])
def test_wrapped_modules_end_where_unsharded_ones_do(ranks, stages, overlap):
    ranks(2)(like_unsharded, ["AdamW"], stages, True, overlap)


ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]

WHOLE = ["Adafactor", "Derived"]


class Derived(torch.optim.SGD):
    """A subclass that may inspect a whole parameter."""


def every_optimizer() -> None:
    dist.init_process_group()
    x, targets = torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank())), torch.arange(6)
    for name in (*ELEMENTWISE, *WHOLE):
        optimizer_class = getattr(torch.optim, name, Derived)
        torch.manual_seed(0)
        reference = dist.DistributedDataParallel(nn.Sequential(nn.Linear(8, 300, bias=False), nn.Linear(300, 20)))
        model = copy.deepcopy(reference.module)
        options = {"lr": 0.01, **({"momentum": 0.9} if name in ("SGD", "Derived") else {})}
        optimizer = optimizer_class(reference.parameters(), **options)
        sharded = dist.ZeroRedundancyOptimizer(model, optimizer_class, stage=2, **options)
        for _ in range(3):
            for each, its_optimizer in ((reference, optimizer), (model, sharded)):
                its_optimizer.zero_grad()
                nn.functional.cross_entropy(each(x), targets).backward()
                its_optimizer.step()
        for mine, other in zip(model.parameters(), reference.module.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        whole = {id(param) for param in model.parameters()}  # only an elementwise optimizer gets parts of parameters
        assert all(id(updated) in whole for updated in sharded.state) == (name in WHOLE), name
        sharded.consolidate_state_dict()
        if dist.get_rank() == 0:
            require_close(sharded.state_dict()["state"], optimizer.state_dict()["state"])


def test_every_optimizer_of_torchs_steps_as_unsharded(ranks):
    ranks(2)(every_optimizer)


def like_torch(file: str) -> None:
    import torch.distributed as gloo
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group()
    gloo.init_process_group("gloo", f"file://{file}", rank=dist.get_rank(), world_size=dist.get_world_size())
    for name, (optimizer_class, options) in OPTIMIZERS.items():
        ours = dist.DistributedDataParallel(build("transformer"))
        theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(ours.module))
        options = {**options, "overlap_with_ddp": False}  # torch's default
        our_optimizer = dist.ZeroRedundancyOptimizer(ours.parameters(), optimizer_class, **options)
        their_optimizer = ZeroRedundancyOptimizer(theirs.parameters(), optimizer_class, **options)
        require_close(train(ours, our_optimizer, "transformer"), train(theirs, their_optimizer, "transformer"))

        parts = their_optimizer._partition_parameters()[dist.get_rank()]
        place_of = {id(param): place for place, param in enumerate(theirs.parameters())}
        their_part = {place_of[id(param)] for group in parts for param in group["params"]}
        place_of = {id(param): place for place, param in enumerate(ours.parameters())}
        assert {place_of[id(param)] for param in our_optimizer.state} == their_part, name

        our_optimizer.consolidate_state_dict()
        their_optimizer.consolidate_state_dict()
        if dist.get_rank() == 0:
            state, other = our_optimizer.state_dict(), their_optimizer.state_dict()
            require_close(state["state"], other["state"])
            assert state["param_groups"] == other["param_groups"]
    gloo.destroy_process_group()
    with pytest.raises(ValueError, match="pass overlap=True"):
        dist.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)


def test_stage_one_is_torchs(ranks, tmp_path):
    ranks(2)(like_torch, str(tmp_path / "gloo"))


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    params = list(model.parameters())
    owned = {id(each): each for each in (*params, *optimizer.state)}.values()  # with flat runs of parameters
    state = [each for values in optimizer.state.values() for each in values.values() if each.dim()]
    return {
        "state": sum(each.nbytes for each in state),
        "gradients": sum(each.grad.untyped_storage().nbytes() for each in owned if each.grad is not None),
        "parameters": sum({s.data_ptr(): s.nbytes() for s in (each.untyped_storage() for each in owned)}.values()),
    }


def measure_memory() -> list[tuple[int, int, dict[str, int]]]:
    """Returns for each stage and model: the stage, the bytes of the parameters, and the bytes on this rank."""
    dist.init_process_group()
    seen = []
    for stage in (1, 2, 3):
        deep = nn.Sequential(*(nn.Linear(32, 32) for _ in range(12)))
        wide = nn.Sequential(nn.Linear(128, 100), nn.Linear(100, 60))
        for model in (deep, wide):
            whole = sum(param.nbytes for param in model.parameters())
            optimizer = dist.ZeroRedundancyOptimizer(model, torch.optim.Adam, stage=stage)
            model(torch.ones(2, model[0].in_features)).sum().backward()
            optimizer.step()
            seen.append((stage, whole, held(model, optimizer)))
    return seen


def test_a_rank_holds_only_its_part_of_what_the_stage_shards(ranks):
    for rank in ranks(3)(measure_memory):
        for stage, whole, at in rank:
            assert at["state"] <= 2 * whole * (1 / 3 + 0.05)
            assert at["gradients"] <= whole * (1 / 3 + 0.05 if stage > 1 else 1)
            assert at["parameters"] <= whole * (1 / 3 + 0.05 if stage > 2 else 1)


Make = Callable[[nn.Module, list[dict[str, object]]], tuple[nn.Module, torch.optim.Optimizer]]


def groups_and_schedules() -> None:
    dist.init_process_group()

    def run(make: Make) -> tuple[list[float], object]:
        model = build("mlp")
        late = list(model[4].parameters())
        groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}]
        model, optimizer = make(model, groups)
        losses = train(model, optimizer, steps=3)
        optimizer.add_param_group({"params": late, "lr": 0.03, "weight_decay": 0.2})
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(3, 12):
            losses += train(model, optimizer, steps=1, first=step)
            schedule.step()
        return losses, [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    expected = run(lambda m, g: (dist.DistributedDataParallel(m), torch.optim.AdamW(g, lr=0.01)))
    for stage in (1, 2, 3):

        def shard(
            m: nn.Module, g: list[dict[str, object]], stage: int = stage
        ) -> tuple[nn.Module, torch.optim.Optimizer]:
            return m, dist.ZeroRedundancyOptimizer(g, torch.optim.AdamW, module=m, stage=stage, lr=0.01)

        seen = run(shard)
        require_close(seen[0], expected[0])
        assert seen[1] == expected[1]


def test_later_parameter_groups_count_as_they_do_unsharded(ranks):
    ranks(2)(groups_and_schedules)


class Phase(enum.IntEnum):
    WARM_UP = 3


def states_that_are_gathered() -> None:
    dist.init_process_group()
    group, rank = dist.group.WORLD, dist.get_rank()
    tensor = nn.Parameter(torch.full((2,), float(rank)))
    gathered = gather_state({rank: {"phase": Phase.WARM_UP, "moment": tensor, "flag": True}}, group, 0)
    if rank == 0:
        assert gathered is not None and [*gathered] == [0, 1]
        assert [type(state["moment"]) for state in gathered.values()] == [torch.Tensor] * 2
        assert [(state["phase"], state["flag"]) for state in gathered.values()] == [(3, True)] * 2
    else:
        assert gathered is None
    named = (
        r"rank 1 has a state with 'odd' of type object. Use an optimizer"
        if rank == 1
        else r"rank 1 \(.*could not send its object"
    )
    with pytest.raises(TypeError, match=f"consolidate_state_dict: .*{named}"):
        gather_state({rank: {"odd": object() if rank == 1 else 1}}, group, 0)


def test_states_are_gathered_or_refused_on_all_ranks(ranks):
    ranks(2)(states_that_are_gathered)
