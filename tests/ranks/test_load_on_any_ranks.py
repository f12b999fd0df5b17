"""Checkpoints from every kind of training, saved by 4 ranks and loaded by any number of ranks."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_training import KINDS, Contents, Loop, Net, load_all_kinds, save_all_kinds
from torch import nn
from world import RankFailed, Ranks, close_worlds

import paceline as dist
from paceline.parallel.hooks import allreduce_hook
from paceline.train.checkpoint.captured_state import capture
from paceline.train.checkpoint.format.root import open_checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Contents]]]:
    root = tmp_path_factory.mktemp("checkpoints")
    first, *_ = Ranks(4)(save_all_kinds, root)
    yield root, first  # type: ignore[misc]
    close_worlds()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_four_ranks_save_and_any_number_loads(saved: tuple[Path, dict[str, Contents]], size: int) -> None:
    root, expected = saved
    first: Any = Ranks(size)(load_all_kinds, root)[0]
    for kind in KINDS:
        found, plain = first[kind]
        assert plain == {"steps": (1, 2.5), 7: None}
        for name, contents in expected[kind].items():
            assert found[name] == contents, f"{name} of {kind}"


@pytest.mark.parametrize("kind", KINDS)
def test_each_byte_is_written_once(saved: tuple[Path, dict[str, Contents]], kind: str) -> None:
    root, _ = saved
    (step,) = (root / kind).glob("step_*")
    manifest = json.loads((step / "manifest.json").read_bytes())
    writers = {name.split("_")[1] for name in manifest["files"]}
    assert len(writers) == 4
    written = sum(path.stat().st_size for path in step.glob("*.safetensors"))
    model = sum(each.nbytes for each in Net().state_dict().values())
    assert written < 3 * model + 64 * 1024  # parameters and two moments of the optimizer, and the headers


def load_and_count(root: Path) -> tuple[int, int]:
    from paceline.train.checkpoint.load import load_from
    from paceline.train.checkpoint.rank_channel import channel_of

    dist.init_process_group()
    model = nn.Linear(4096, 2048)
    (step,) = root.glob("step_*")
    loaded = load_from({"model": model}, str(step), channel_of(None))
    assert float(model.weight.sum()) == 4096 * 2048
    return loaded.nbytes_read, sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_byte_is_read_about_once(ranks: type[Ranks], tmp_path: Path, size: int) -> None:
    model = nn.Linear(4096, 2048)
    nn.init.ones_(model.weight)
    dist.save({"model": model}, tmp_path, step=1)
    counted: Any = ranks(size)(load_and_count, tmp_path)
    assert sum(read for read, _ in counted) == counted[0][1]


def save_what_differs(root: Path) -> None:
    dist.init_process_group()
    torch.manual_seed(dist.get_rank())
    mine = {"rank": dist.get_rank(), "random": dist.RandomState(), "same": 5}
    dist.save(mine, root)
    expected = torch.rand(3)
    torch.manual_seed(99)
    got: dict[str, Any] = {"rank": None, "random": dist.RandomState(), "same": None}
    dist.load(got, root)
    assert (got["rank"], got["same"]) == (dist.get_rank(), 5)
    assert torch.equal(torch.rand(3), expected)


def test_what_differs_is_kept_for_each_rank(ranks: type[Ranks], tmp_path: Path) -> None:
    ranks(3)(save_what_differs, tmp_path)


def save_tensors_that_differ(root: Path) -> None:
    """Saves a tensor of 4 MiB. If it were the same on all ranks, each rank would write a part of it."""
    dist.init_process_group()
    rank = dist.get_rank()
    batches = nn.BatchNorm1d(2)
    batches.running_mean.fill_(rank)  # the dict contains each rank's buffers, which a module loads
    torch.rand(rank)
    mine = {"large": torch.full((1 << 20,), float(rank)), "same": torch.ones(3), "random": torch.get_rng_state()}
    dist.save({**mine, "inner": {"long": torch.ones(rank + 1)}, "model": batches.state_dict()}, root)
    expected = torch.rand(3)
    got = {**{name: torch.zeros_like(tensor) for name, tensor in mine.items()}, "model": nn.BatchNorm1d(2)}
    dist.load({**got, "inner": {"long": torch.zeros(rank + 1)}}, root)
    assert all(torch.equal(got[name], mine[name]) for name in ("large", "same", "random"))
    torch.set_rng_state(got["random"])
    assert torch.equal(torch.rand(3), expected)
    assert got["model"].running_mean.tolist() == [rank, rank]
    got = {"large": None, "inner": None}
    dist.load(got, root)
    assert got["large"].unique().tolist() == [rank]
    assert got["inner"]["long"].tolist() == [1] * (rank + 1)


def test_tensors_that_differ_are_kept_for_each_rank(ranks: type[Ranks], tmp_path: Path) -> None:
    ranks(2)(save_tensors_that_differ, tmp_path)
    got = {"large": torch.ones(1 << 20), "same": None}  # a single rank loads the tensor of rank 0
    dist.load(got, tmp_path)
    assert not got["large"].any()


def separate_training(rank: int) -> dict[str, Any]:
    """Returns a model that each rank trains alone, with its optimizer, and a model that is the same on all ranks."""
    torch.manual_seed(rank)
    own = nn.Sequential(nn.Linear(600, 600), nn.BatchNorm1d(600), nn.Linear(600, 1))
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.1 + rank)
    own(torch.randn(4, 600)).sum().backward()
    optimizer.step()
    torch.manual_seed(9)
    return {"own": own, "optimizer": optimizer, "teacher": nn.Linear(600, 600)}


def save_separate_models(root: Path) -> list[str]:
    dist.init_process_group()
    state = separate_training(dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.save(state, root)
    return [str(each.message) for each in caught]


def load_separate_models(root: Path) -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    expected, found = separate_training(rank if rank < 2 else 0), separate_training(7)
    whole: dict[str, Any] = {"own": None, "optimizer": None}
    dist.load(found, root)
    dist.load(whole, root)
    torch.testing.assert_close(found["own"].state_dict(), expected["own"].state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(found["teacher"].state_dict(), expected["teacher"].state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(dict(whole["own"]), dict(expected["own"].state_dict()), rtol=0, atol=0)
    for loaded in (found["optimizer"].state_dict(), whole["optimizer"]):
        assert loaded["param_groups"][0]["lr"] == expected["optimizer"].param_groups[0]["lr"]
        torch.testing.assert_close(loaded["state"], expected["optimizer"].state_dict()["state"], rtol=0, atol=0)


def test_models_that_differ_are_kept_for_each_rank(ranks: type[Ranks], tmp_path: Path) -> None:
    first, other = ranks(2)(save_separate_models, tmp_path)
    for size in (1, 2, 3):
        Ranks(size)(load_separate_models, tmp_path)
    assert len(first) == 1
    assert "rank 0: the ranks have different values in 'own' and 'optimizer'" in first[0]
    assert other == []
    saved = {name.partition("/")[0] for name in open_checkpoint(tmp_path).manifest.tensors}
    assert saved == {"own@rank0", "own@rank1", "optimizer@rank0", "optimizer@rank1", "teacher"}


def compared_names(root: Path) -> list[set[str]]:
    """Returns the names of the objects whose digests are compared, for wrapped models and for other models."""
    dist.init_process_group()
    wrapped = dist.DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(wrapped.parameters())
    other = nn.Linear(2, 2)
    mixed = torch.optim.AdamW([*wrapped.parameters(), *other.parameters()])
    partly = nn.Linear(2, 2)
    dist.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(partly, ["bias"])
    shards = dist.LogicalShards(nn.Linear(2, 2), 4)
    state = {
        "wrapped": wrapped,
        "inner": wrapped.module,
        "optimizer": optimizer,
        "shards": shards,
        "compiled": torch.compile(wrapped),
        "other": other,
        "mixed": mixed,
        "partly": dist.DistributedDataParallel(partly),
    }
    found = [set(capture(state, True).replicas)]
    wrapped.register_comm_hook(None, allreduce_hook)
    found.append(set(capture(state, True).replicas))
    return found


def test_models_that_a_wrapper_keeps_the_same_are_not_compared(ranks: type[Ranks], tmp_path: Path) -> None:
    for before, after in ranks(2)(compared_names, tmp_path):
        assert before == {"other", "mixed", "partly"}
        assert after == {"other", "mixed", "partly", "wrapped", "inner", "optimizer", "compiled"}


def save_different_models(root: Path) -> None:
    dist.init_process_group()
    width = 3 + dist.get_rank() // 2
    with pytest.raises(dist.CheckpointError, match=r"'model/weight' as F32\[2, 3\], rank 2 has F32\[2, 4\]"):
        dist.save({"model": nn.Linear(width, 2)}, root)
    state = {"odd": object() if dist.get_rank() == 1 else 1}
    with pytest.raises(dist.CheckpointError, match=r"rank 1: odd is a builtins\.object.*cannot contain"):
        dist.save(state, root)
    assert not [*root.iterdir()]
    dist.save({"odd": 1}, root)  # the group is still usable


def test_all_ranks_learn_of_one_ranks_mistake(ranks: type[Ranks], tmp_path: Path) -> None:
    ranks(3)(save_different_models, tmp_path)


def save_where_nobody_may(root: Path) -> None:
    dist.init_process_group()
    with pytest.raises(dist.CheckpointError, match=r"^rank 0 .*taken: Not a directory"):
        dist.save({"model": nn.Linear(2, 2)}, root / "taken")


def test_a_place_that_cannot_be_written_is_named(ranks: type[Ranks], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    ranks(2)(save_where_nobody_may, tmp_path)


def test_wrong_models_are_refused_by_name(tmp_path: Path) -> None:
    dist.save({"model": nn.Linear(3, 2)}, tmp_path)
    with pytest.raises(dist.CheckpointError, match=r"shape \[2, 3\] in .*, but \[2, 5\] here"):
        dist.load({"model": nn.Linear(5, 2)}, tmp_path)
    with pytest.raises(dist.CheckpointError, match=r"also has \['bias'\]"):
        dist.load({"model": nn.Linear(3, 2, bias=False)}, tmp_path)
    with pytest.raises(dist.CheckpointError, match="has no 'optimizer'; it has 'model'"):
        dist.load({"optimizer": torch.optim.SGD(nn.Linear(3, 2).parameters())}, tmp_path)
    dist.load({"model": nn.Linear(3, 2, bias=False), "other": 1}, tmp_path, strict=False)


def test_a_rank_that_fails_shows_its_traceback(ranks: type[Ranks], tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="ZeroDivisionError"):
        ranks(2)(save_what_raises, tmp_path)


class Raises:
    def state_dict(self) -> float:
        return 1 / 0

    def load_state_dict(self, state: object) -> None:
        pass


def save_what_raises(root: Path) -> None:
    dist.init_process_group()
    dist.save({"bad": Raises() if dist.get_rank() == 1 else 3}, root)


def resume_in_shards(root: Path, steps: int, saves: bool, loads: bool) -> list[int]:
    dist.init_process_group()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 2))
    shards = dist.LogicalShards(model, 4)
    data = torch.randn(96, 6, generator=torch.Generator().manual_seed(7))
    loader = dist.ShardLoader(torch.utils.data.TensorDataset(data), 3, shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    state = {"model": shards, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    if loads:
        dist.load(state, root)
    while steps:
        for batches in loader:
            optimizer.zero_grad()
            shards.backward(lambda x: model(x[0]).square().mean(), batches)
            optimizer.step()
            schedule.step()
            steps -= 1
            if not steps:
                break
    if saves:
        dist.save(state, root)
    return [each for tensor in model.state_dict().values() for each in tensor.view(-1).view(torch.uint8).tolist()]


def test_a_resumed_training_has_the_same_bits(ranks: type[Ranks], tmp_path: Path) -> None:
    expected = ranks(2)(resume_in_shards, tmp_path, 12, False, False)[0]
    ranks(4)(resume_in_shards, tmp_path, 7, True, False)
    assert ranks(3)(resume_in_shards, tmp_path, 5, False, True)[0] == expected


def save_with_torch(root: Path) -> None:
    """torch's DCP saves and loads the same values as Paceline."""
    import torch.distributed.checkpoint as dcp

    loop = Loop("plain", seed=3)
    loop.train(2)
    dist.save({"model": loop.model}, root / "ours")
    dcp.save({"model": loop.model.module.state_dict()}, checkpoint_id=str(root / "torchs"), no_dist=True)


def load_with_torch(root: Path) -> None:
    import torch.distributed.checkpoint as dcp

    ours, theirs = Net(), Net()
    dist.load({"model": ours}, root / "ours")
    state = {"model": theirs.state_dict()}
    dcp.load(state, checkpoint_id=str(root / "torchs"), no_dist=True)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, state["model"][name]), name


def save_and_load_with_torch(root: Path) -> None:
    dist.init_process_group()
    save_with_torch(root)
    load_with_torch(root)


def test_what_is_loaded_is_what_torchs_dcp_loads(ranks: type[Ranks], tmp_path: Path) -> None:
    ranks(1)(save_and_load_with_torch, tmp_path)


def state_with_empties(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.Identity())
    return {
        "model": dist.DistributedDataParallel(model),
        "loss": nn.CrossEntropyLoss(),
        "scaler": torch.amp.GradScaler("cpu", enabled=False),
        "inner": {"head": nn.Identity(), "ema": {"w": torch.full((2,), float(seed))}, "none": {}},
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "mine": {} if dist.get_rank() == 0 else {"rank": dist.get_rank()},
    }


def save_empties(root: Path) -> None:
    dist.init_process_group()
    dist.save(state_with_empties(1), root, step=1)


def load_empties(root: Path) -> None:
    dist.init_process_group()
    state, expected = state_with_empties(2) | {"mine": None}, state_with_empties(1)
    dist.load(state, root)
    assert state["mine"] == (expected["mine"] if dist.get_rank() < 2 else {})
    assert torch.equal(state["inner"]["ema"]["w"], torch.ones(2)) and state["inner"]["none"] == {}
    assert torch.equal(state["model"].module[0].weight, expected["model"].module[0].weight)
    into: dict[str, Any] = {"model": None, "loss": None, "inner": None, "scaler": None}
    dist.load(into, root)
    assert torch.equal(into["model"]["0.weight"], expected["model"].module[0].weight)
    assert (into["loss"], into["scaler"], into["inner"]["head"], into["inner"]["none"]) == ({}, {}, {}, {})
    assert torch.equal(into["inner"]["ema"]["w"], torch.ones(2))


@pytest.mark.parametrize("size", [1, 3])
def test_empty_states_of_two_ranks_are_loaded_by_any_number(ranks: type[Ranks], tmp_path: Path, size: int) -> None:
    ranks(2)(save_empties, tmp_path)
    ranks(size)(load_empties, tmp_path)
