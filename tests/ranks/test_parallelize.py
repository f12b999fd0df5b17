"""Tensor parallelism on real processes, compared with the undivided model and with torch's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import paceline as dist
from paceline.train.tensor.layers import slice_of

WIDTH, HEADS, VOCABULARY = 16, 4, 21


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v)]
        return self.out(nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(torch.relu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def built(tied: bool = False, dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(5)
    return Model(tied).to(dtype)


def plain_plan(styles=dist) -> dict[str, object]:
    colwise, rowwise = styles.ColwiseParallel, styles.RowwiseParallel
    return {
        "embedding": rowwise(input_layouts=Replicate()),
        "blocks.*.attention.q": colwise(),
        "blocks.*.attention.k": colwise(),
        "blocks.*.attention.v": colwise(),
        "blocks.*.attention.out": rowwise(),
        "blocks.*.up": colwise(),
        "blocks.*.down": rowwise(),
        "head": colwise(output_layouts=Replicate()),
    }


def sequence_plan() -> dict[str, object]:
    gathered = {"input_layouts": Shard(1)}
    scattered = {"output_layouts": Shard(1)}
    return {
        **{f"blocks.*.attention.{name}": dist.ColwiseParallel(**gathered) for name in "qkv"},
        "embedding": dist.RowwiseParallel(input_layouts=Replicate(), **scattered),
        "blocks.*.norm_*": dist.SequenceParallel(),
        "blocks.*.attention.out": dist.RowwiseParallel(**scattered),
        "blocks.*.up": dist.ColwiseParallel(**gathered),
        "blocks.*.down": dist.RowwiseParallel(**scattered),
        "norm": dist.SequenceParallel(),
        "head": dist.ColwiseParallel(**gathered, output_layouts=Replicate()),
    }


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (3, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    inputs, targets = batch(step)
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def part(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    mine = slice_of(like)
    return whole if mine is None else whole.narrow(mine.dim, mine.start, mine.stop - mine.start)


def like_the_whole(plan: dict[str, object], tied: bool) -> None:
    dist.init_process_group()
    model = built(tied)
    reference = copy.deepcopy(model)
    if dist.get_rank():
        nn.init.zeros_(model.norm.weight)  # the model must get rank 0's weights
    assert dist.parallelize_module(model, None, plan) is model
    held = sum(each.numel() for each in model.parameters())
    assert held < 0.6 * sum(each.numel() for each in reference.parameters())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, reference)]
    for step in range(4):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(each, step).backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, part(theirs.grad, mine), rtol=1e-10, atol=1e-10)
        norm = dist.clip_grad_norm_(model.parameters(), 0.5)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch.testing.assert_close(norm, expected, rtol=1e-10, atol=1e-10)
        for optimizer in optimizers:
            optimizer.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), part(theirs.detach(), mine), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(loss_of(model, 9), loss_of(reference, 9), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tied", [False, True])
def test_a_divided_transformer_trains_like_the_whole_one(ranks, tied):
    ranks(2)(like_the_whole, plain_plan(), tied)


def test_the_sequence_is_divided_too(ranks):
    ranks(2)(like_the_whole, sequence_plan(), False)


def test_four_ranks_divide_a_transformer(ranks):
    ranks(4)(like_the_whole, sequence_plan(), True)


def beside_torch(rendezvous: str) -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch_dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    exact = built()
    loss_of(exact, 0).backward()
    mine, theirs = built(dtype=torch.float32), built(dtype=torch.float32)
    dist.parallelize_module(mine, None, plain_plan())
    parallel.parallelize_module(theirs, init_device_mesh("cpu", (size,)), plain_plan(parallel))
    for each in (mine, theirs):
        loss_of(each, 0).backward()
    worst = {"mine": 0.0, "theirs": 0.0}
    for true, own, other in zip(exact.parameters(), mine.parameters(), theirs.parameters(), strict=True):
        gathered = other.grad.full_tensor() if hasattr(other.grad, "full_tensor") else other.grad
        worst["theirs"] = max(worst["theirs"], (gathered - true.grad).abs().max().item())
        worst["mine"] = max(worst["mine"], (own.grad - part(true.grad, own)).abs().max().item())
    errors = torch.tensor(worst["mine"])
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    assert errors.item() <= 4 * worst["theirs"] + 1e-7, worst
    torch_dist.destroy_process_group()


def test_float32_is_as_good_as_in_torchs_own(ranks, tmp_path):
    ranks(2)(beside_torch, str(tmp_path / "rendezvous"))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, keep: str = "") -> tuple[torch.Tensor, str]:
        return 2 * x * scale, keep


class Single(nn.Module):
    """Returns a tuple with one element."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (2 * x,)


PREPARED = (  # input, desired input, keyword, desired keyword, output, desired output
    (Shard(0), Shard(1), Replicate(), Shard(1), Shard(1), Shard(0)),
    (Shard(0), Replicate(), Replicate(), Replicate(), Replicate(), Shard(1)),
    (Partial(), Replicate(), Shard(1), Replicate(), Replicate(), Replicate()),
    (Partial(), Shard(1), Shard(1), Shard(1), Shard(1), Replicate()),
)


def prepared_like_torchs(rendezvous: str) -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch_dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(16.0).reshape(4, 4)

    def placed(layout) -> torch.Tensor:
        own = whole.chunk(size, layout.dim)[rank] if isinstance(layout, Shard) else whole
        return own * (1 + rank) if isinstance(layout, Partial) else own

    for first, first_desired, keyword, keyword_desired, last, last_desired in PREPARED:
        layouts = {
            "input_layouts": first,
            "desired_input_layouts": first_desired,
            "input_kwarg_layouts": {"scale": keyword},
            "desired_input_kwarg_layouts": {"scale": keyword_desired},
            "output_layouts": (last, None),
            "desired_output_layouts": (last_desired, None),
        }
        results = []
        for styles, group in ((dist, None), (parallel, mesh)):
            local = {} if styles is dist else {"use_local_input": True}
            module = Doubled()
            styles.parallelize_module(module, group, styles.PrepareModuleInputOutput(**layouts, **local))
            y, kept = module(placed(first), scale=placed(keyword), keep="kept")
            assert kept == "kept"
            results.append(y)
        torch.testing.assert_close(*results)

    for styles, group in ((dist, None), (parallel, mesh)):
        style = styles.PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        single = styles.parallelize_module(Single(), group, style)(placed(Shard(1)))
        torch.testing.assert_close(single, 2 * whole)
    torch_dist.destroy_process_group()


def test_inputs_and_outputs_are_prepared_as_by_torchs_styles(ranks, tmp_path):
    ranks(2)(prepared_like_torchs, str(tmp_path / "rendezvous"))


class WithKeywords(nn.Module):
    """Calls its layers in ways that need conversions between layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = Norm()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.norm(x=x) + self.down(torch.relu(self.up(x)))


class Norm(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def keyword_gradients() -> None:
    dist.init_process_group()
    torch.manual_seed(5)
    model = WithKeywords().double()
    reference = copy.deepcopy(model)
    plan = {
        "embedding": dist.ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        "up": dist.ColwiseParallel(),
        "down": dist.RowwiseParallel(),
        "norm": dist.PrepareModuleInputOutput(
            input_kwarg_layouts={"x": Replicate()},
            desired_input_kwarg_layouts={"x": Shard(1)},
            output_layouts=Shard(1),
            desired_output_layouts=Replicate(),
        ),
    }
    dist.parallelize_module(model, None, plan)
    dist.parallelize_module(model.norm, None, dist.SequenceParallel())
    tokens = batch(0)[0][:2]
    mine, theirs = model(tokens.chunk(2)[dist.get_rank()]), reference(tokens)
    torch.testing.assert_close(mine, theirs)
    for output in (mine, theirs):
        output.square().sum().backward()
    for own, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, part(whole.grad, own), rtol=1e-10, atol=1e-10)


def test_keyword_arguments_are_converted_with_correct_gradients(ranks):
    ranks(2)(keyword_gradients)


class WithoutNorm(WithKeywords):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.embedding(tokens))))


def layouts_between_layers() -> None:
    dist.init_process_group()
    torch.manual_seed(5)
    for kind in (dist.ColwiseParallel, dist.RowwiseParallel):
        model = WithoutNorm().double()
        reference = copy.deepcopy(model)
        plan = {
            "embedding": kind(input_layouts=Shard(0), output_layouts=Shard(1)),
            "up": dist.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(0)),
            "down": dist.RowwiseParallel(input_layouts=Shard(0)),
        }
        dist.parallelize_module(model, None, plan)
        tokens = torch.arange(8).reshape(2, 4)
        mine, theirs = model(tokens.chunk(2)[dist.get_rank()]), reference(tokens)
        torch.testing.assert_close(mine, theirs)
        for output in (mine, theirs):
            output.square().sum().backward()
        for own, whole in zip(model.parameters(), reference.parameters(), strict=True):
            if whole.grad is not None:
                torch.testing.assert_close(own.grad, part(whole.grad, own), rtol=1e-10, atol=1e-10)


def features_of_a_rowwise_layer() -> None:
    dist.init_process_group()
    torch.manual_seed(5)
    for size in (6, 7):  # 7 features cannot be divided evenly
        model, x = nn.Linear(4, size).double(), torch.randn(3, 4, dtype=torch.float64)
        reference = copy.deepcopy(model)
        style = dist.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1))
        dist.parallelize_module(model, None, style)
        mine, theirs = model(x), reference(x).tensor_split(2, -1)[dist.get_rank()]
        torch.testing.assert_close(mine, theirs)
        mine.square().sum().backward()
        reference(x).square().sum().backward()
        for own, whole in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own.grad, part(whole.grad, own), rtol=1e-10, atol=1e-10)


def test_a_rowwise_layer_divides_its_output_by_features(ranks):
    ranks(2)(features_of_a_rowwise_layer)


def test_layers_convert_their_inputs_and_outputs_to_any_layout(ranks):
    ranks(2)(layouts_between_layers)


def what_is_refused() -> None:
    dist.init_process_group()
    for plan, kind, text in (
        ({"nothing": dist.ColwiseParallel()}, ValueError, "no module has the name 'nothing'"),
        ({"norm": dist.ColwiseParallel()}, TypeError, "'norm' is a LayerNorm; ColwiseParallel needs nn.Linear"),
        (
            {"embedding": dist.ColwiseParallel(), "head": dist.ColwiseParallel()},
            ValueError,
            "two modules share a weight, and the plan divides it along different dimensions",
        ),
    ):
        with pytest.raises(kind, match=text):
            dist.parallelize_module(built(tied=True), None, plan)
    with pytest.raises(ValueError, match=r"output_layouts is (P|Partial)\(.*\); it must be Replicate\(\) or Shard"):
        dist.ColwiseParallel(output_layouts=Partial())
    with pytest.raises(ValueError, match="there are 1 input_layouts and 0 desired_input_layouts"):
        dist.PrepareModuleInput(input_layouts=Shard(1))
    with pytest.raises(ValueError, match=r"input_kwarg_layouts has the names \['x'\], and .* has \['y'\]"):
        dist.PrepareModuleInput(input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"y": Shard(1)})
    layouts = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    norm = dist.parallelize_module(Norm(), None, dist.PrepareModuleInput(**layouts))
    with pytest.raises(ValueError, match=r"rank \d.* 0 positional arguments .*\['x'\]; .*use input_kwarg_layouts"):
        norm(x=torch.ones(2, WIDTH))
    model = dist.parallelize_module(built(), None, plain_plan())
    with pytest.raises(IndexError, match="the indices range from 0 to 21; they must be from 0 to 20"):
        model(torch.tensor([[0, VOCABULARY]]))


def test_plans_that_do_not_fit_are_refused(ranks):
    ranks(2)(what_is_refused)


def three_dimensions() -> None:
    dist.init_process_group()
    mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    model = built()
    reference = copy.deepcopy(model)
    dist.parallelize_module(model, mesh["tp"], plain_plan())
    layers = [model.embedding, *model.blocks, model.norm, model.head]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    groups = {"group": mesh.get_group("pp"), "data_parallel_group": mesh.get_group("dp")}
    pipeline = dist.Pipeline(layers, loss, micro_batches=2, split=[2, 3], **groups)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (8, 9), generator=generator)
    own = tokens[4 * mesh.get_local_rank("dp") :][:4]
    pipeline.step(own[:, :-1], own[:, 1:])
    loss(reference(tokens[:, :-1]), tokens[:, 1:]).backward()
    numbered = dict(enumerate([reference.embedding, *reference.blocks, reference.norm, reference.head]))
    for number, layer in pipeline.named_children():
        for mine, theirs in zip(layer.parameters(), numbered[int(number)].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, part(theirs.grad, mine), rtol=1e-10, atol=1e-10)
    norm = dist.clip_grad_norm_(pipeline.parameters(), 0.5, pipeline_group=mesh.get_group("pp"))
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.5), rtol=1e-10, atol=1e-10)


def test_data_pipeline_and_tensor_parallelism_together(ranks):
    ranks(8)(three_dimensions)
