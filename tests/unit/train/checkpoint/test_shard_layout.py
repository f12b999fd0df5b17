"""Checkpoints of sharded models are saved in one layout and loaded in another; threads represent ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from divided_training import Layout, built, divided, grouped, require_part, require_same, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sampling import examples
from threads_group import ThreadGroup, ThreadMesh
from torch import nn

import paceline as dist
from paceline.cli.main import main
from paceline.train.checkpoint.format.checkpoint import Checkpoint
from paceline.train.checkpoint.format.regions import Flat, Region, TensorBlock, count, untiled
from paceline.train.checkpoint.format.root import open_checkpoint
from paceline.train.checkpoint.load import load_from
from paceline.train.checkpoint.rank_channel import GroupChannel
from paceline.train.checkpoint.save_plan import Offer, assign_offers
from paceline.train.checkpoint.shard_layout import ShardLayout, cut, whole_of
from paceline.train.tensor.layers import bounds

SIMPLE = [Layout(1, 1, 2), Layout(1, 1, 4), Layout(1, 2, 1), Layout(1, 2, 2), Layout(2, 1, 2, zero=1)]

layouts = st.builds(
    Layout,
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 2),
).filter(lambda each: each.replicas * each.stages * each.parts <= 8)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("whole")
    state = trained()
    dist.save(state, path, step=2)
    return path, state


def passed_on(source: Path, target: Path, layout: Layout, expected: dict[str, Any]) -> list[int]:
    """Loads a checkpoint with one layout and saves it again; returns the bytes that each rank wrote."""

    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> None:
        state = divided(layout, groups)
        assert dist.load(state, source, group=world) == 2
        require_part(state, expected)
        dist.save(state, target, step=2, group=world)

    mesh = ThreadMesh(*layout.shape)
    mesh.run(program)
    (step,) = target.glob("step_*")
    sizes = [0] * mesh.size
    for file in step.glob("*.safetensors"):
        sizes[int(file.name.split("_")[1])] += file.stat().st_size
    return sizes


def contents(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    entries = checkpoint.manifest.tensors
    return {name: (entry.dtype, entry.shape, bytes(checkpoint.read(name))) for name, entry in entries.items()}


def require_the_same_checkpoint(path: Path, source: Path) -> None:
    with open_checkpoint(path) as one, open_checkpoint(source) as other:
        assert contents(one) == contents(other)
        assert one.manifest.values == other.manifest.values


def require_back_in_one_piece(path: Path, expected: dict[str, Any]) -> None:
    model = built()
    state = {"model": model, "optimizer": torch.optim.AdamW(grouped(model), lr=0.5), "steps": 0}
    dist.load(state, path)
    require_same(state, expected)


@pytest.mark.parametrize("layout", SIMPLE, ids=str)
def test_a_layouts_checkpoint_is_the_whole_models(layout, whole, tmp_path):
    source, expected = whole
    sizes = passed_on(source, tmp_path, layout, expected)
    require_the_same_checkpoint(tmp_path, source)
    require_back_in_one_piece(tmp_path, expected)
    assert min(sizes) > 0, "every rank writes"


@settings(max_examples=examples(4))
@given(layouts, layouts)
def test_any_layout_goes_on_as_any_other(tmp_path_factory, first, second):
    root = tmp_path_factory.mktemp("any")
    expected = trained()
    dist.save(expected, root / "whole", step=2)
    passed_on(root / "whole", root / "first", first, expected)
    passed_on(root / "first", root / "second", second, expected)
    require_the_same_checkpoint(root / "second", root / "whole")
    require_back_in_one_piece(root / "second", expected)


def test_interleaved_stages_keep_the_order_of_the_model(whole, tmp_path):
    source, expected = whole
    passed_on(source, tmp_path, Layout(1, 2, 1, schedule="interleaved"), expected)
    require_the_same_checkpoint(tmp_path, source)


def test_a_rank_reads_its_own_part_only(tmp_path):
    rows = 4096
    dist.save({"model": nn.Linear(1024, rows, bias=False)}, tmp_path, step=1)
    (step,) = tmp_path.glob("step_*")

    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> int:
        model = nn.Linear(1024, rows, bias=False)
        dist.parallelize_module(model, groups[0], dist.ColwiseParallel(), src_data_rank=None)
        return load_from({"model": model}, str(step), GroupChannel(world)).nbytes_read

    read = ThreadMesh(4).run(program)
    assert sum(read) == rows * 1024 * 4
    assert max(read) == min(read)


def test_the_command_works_on_a_divided_models_checkpoint(whole, tmp_path, capsys):
    source, expected = whole
    passed_on(source, tmp_path / "parts", Layout(1, 2, 2), expected)
    assert main(["checkpoint", "verify", str(tmp_path / "parts")]) == 0
    assert main(["checkpoint", "diff", str(tmp_path / "parts"), str(source)]) == 0
    assert main(["checkpoint", "export", str(tmp_path / "parts"), str(tmp_path / "model.safetensors")]) == 0
    capsys.readouterr()
    built().load_state_dict(exported := load_file(tmp_path / "model.safetensors"))
    assert all(torch.equal(exported[name], each) for name, each in expected["model"].state_dict().items())


@pytest.mark.parametrize("layout", [Layout(1, 1, 3), Layout(1, 2, 2)], ids=str)
def test_a_file_of_torch_save_is_divided_as_it_is_read(layout, whole, tmp_path):
    _, expected = whole
    file = tmp_path / "whole.pt"
    torch.save(
        {"model": expected["model"].state_dict(), "optimizer": expected["optimizer"].state_dict(), "steps": 2}, file
    )

    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> None:
        state = divided(layout, groups)
        dist.load(state, file, group=world)
        require_part(state, expected)
        dist.save(state, tmp_path / "parts", group=world)

    ThreadMesh(*layout.shape).run(program)
    require_back_in_one_piece(tmp_path / "parts", expected)


def refusal(layout: Layout, path: Path, change: Any) -> str:
    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> None:
        state = divided(layout, groups)
        with pytest.raises(dist.CheckpointError) as caught:
            dist.save(*change(state, world, groups), group=world)
        raise caught.value

    with pytest.raises(dist.CheckpointError) as caught:
        ThreadMesh(*layout.shape).run(program)
    assert not [*path.glob("*")], "nothing was written"
    return str(caught.value)


def test_what_cannot_be_put_together_is_refused(tmp_path):
    def of_a_stage(state, world, groups):
        return {"model": nn.Linear(2, 2) if world.rank() else state["model"]}, tmp_path

    said = refusal(Layout(1, 2, 1), tmp_path, of_a_stage)
    assert "the ranks' states differ" in said

    def layers_alone(state, world, groups):
        return {"model": nn.ModuleList(state["model"].children())}, tmp_path

    said = refusal(Layout(1, 2, 1), tmp_path, layers_alone)
    assert "put the Pipeline itself into the state" in said

    def other_groups(state, world, groups):
        model = state["model"]
        own = [{"params": [each]} for each in model.parameters()] if world.rank() else grouped_once(model)
        return {"optimizer": torch.optim.SGD(own, lr=0.1)}, tmp_path

    said = refusal(Layout(1, 2, 1), tmp_path, other_groups)
    assert "1 parameter groups on rank 0" in said
    assert "empty groups where a rank has no such parameters" in said

    def factored(state, world, groups):
        optimizer = state["optimizer"]
        for each in state["model"].parameters():
            optimizer.state[each]["row"] = torch.zeros(each.size(0), 2)
        return {"optimizer": optimizer}, tmp_path

    said = refusal(Layout(1, 1, 2), tmp_path, factored)
    assert "optimizer state with a value for each element" in said

    def elastic(state, world, groups):
        shards = dist.LogicalShards.__new__(dist.LogicalShards)
        shards.module = state["model"]
        return {"all": shards}, tmp_path

    said = refusal(Layout(1, 1, 2), tmp_path, elastic)
    assert "each of its ranks computes the whole model" in said


def grouped_once(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def test_a_group_without_all_ranks_of_the_mesh_is_refused(tmp_path):
    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> None:
        state = divided(Layout(1, 2, 2), groups)
        _, stages, parts = groups
        with pytest.raises(
            dist.CheckpointError, match="do not add up to the whole: no rank holds .* All ranks of the mesh"
        ):
            dist.save({"model": state["model"]}, tmp_path / f"a{world.rank()}", group=stages)
        with pytest.raises(dist.CheckpointError, match="have 3 of the 5 layers|have 2 of the 5 layers"):
            dist.save({"model": state["model"]}, tmp_path / f"b{world.rank()}", group=parts)

    ThreadMesh(1, 2, 2).run(program)


def test_a_list_of_other_layers_is_refused():
    (group,) = ThreadMesh(1).groups[0]
    model = built()
    with pytest.raises(ValueError, match=r"none of the layers has 'blocks\.2\.down\.bias' of the whole model"):
        dist.Pipeline(
            [model.embedding, *model.blocks[:2], model.head],
            nn.functional.mse_loss,
            micro_batches=1,
            group=group,
            whole=model,
        )
    with pytest.raises(ValueError, match="layer 0, a Linear, is not a module of the whole model"):
        dist.Pipeline(
            [nn.Linear(2, 2), *model.layers()], nn.functional.mse_loss, micro_batches=1, group=group, whole=model
        )


@st.composite
def divisions(draw):
    """Generates tensors that are sharded along a dimension, with several ranks for each part."""
    size = draw(st.integers(1, 6))
    offers: list[list[Offer]] = [[] for _ in range(size)]
    for number in range(draw(st.integers(0, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        dim, parts = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, size))
        of_first = draw(st.booleans())
        for rank in range(size):
            region = part_along(shape, dim, parts, rank % parts)
            if count(region):
                offers[rank].append(Offer(f"t{number}", "F32", shape, region, 4 * count(region), of_first))
    return offers


def part_along(shape: tuple[int, ...], dim: int, parts: int, part: int) -> Region:
    start, stop = bounds(shape[dim], parts, part)
    offset = tuple(start if at == dim else 0 for at in range(len(shape)))
    return TensorBlock(offset, tuple(stop - start if at == dim else length for at, length in enumerate(shape)))


@settings(max_examples=examples(40))
@given(divisions(), st.data(), st.sampled_from([4, 16, 64]))
def test_every_byte_of_a_divided_model_is_written_once(offers, data, alignment):
    loads = [data.draw(st.integers(0, 200)) for _ in offers]
    shares = assign_offers(offers, loads, alignment)
    written: dict[str, list[Region]] = {}
    for own, dealt in zip(offers, shares, strict=True):
        for item, start, stop in dealt:
            offer = own[item]
            held = whole_of(offer.name, torch.empty(offer.nbytes // 4))
            held = type(held)(held.name, held.dtype, offer.shape, offer.region, offer.nbytes, held.elements)
            written.setdefault(offer.name, []).extend(each.region for each in cut(held, start, stop))
    shapes = {each.name: each.shape for own in offers for each in own}
    assert written.keys() == shapes.keys()
    for name, shape in shapes.items():
        assert untiled(shape, written[name]) is None
    assert msgspec.json.decode(msgspec.json.encode(offers[0]), type=list[Offer]) == offers[0]


def test_what_few_ranks_have_is_dealt_out_first():
    alone = Offer("alone", "F32", (1000,), Flat(0, 1000), 4000, False)
    shared = Offer("shared", "F32", (1000,), Flat(0, 1000), 4000, False)
    shares = assign_offers([[alone, shared], [shared]], [0, 0], alignment=4)
    assert [sum(stop - start for _, start, stop in each) for each in shares] == [4000, 4000]


def test_a_parameters_layout_is_computed_once(tmp_path, monkeypatch):
    computed: list[torch.Tensor] = []
    layout_of = ShardLayout.of

    def counted(parameter: torch.Tensor) -> ShardLayout:
        computed.append(parameter)
        return layout_of(parameter)

    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    monkeypatch.setattr(ShardLayout, "of", staticmethod(counted))
    for call in (dist.save, dist.load):
        computed.clear()
        call({"model": model, "optimizer": optimizer}, tmp_path)
        assert sorted(map(id, computed)) == sorted(map(id, model.parameters()))
