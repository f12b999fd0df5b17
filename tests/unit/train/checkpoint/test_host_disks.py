"""Checkpoints on disks that hosts do not share; hosts are emulated by directories, and ranks by threads."""

from __future__ import annotations

import doctest
import errno
import json
import os
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from divided_training import Layout, divided, require_part, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from threads_group import ThreadGroup, ThreadMesh

import paceline as dist
from paceline.train.checkpoint.format.local_storage import LocalStorage
from paceline.train.checkpoint.format.root import Root
from paceline.train.checkpoint.host_disks import Disks, found_disks
from paceline.train.checkpoint.rank_channel import GroupChannel

LAYOUTS = [
    Layout(4, 1, 1),
    Layout(4, 1, 1, zero=1),
    Layout(1, 1, 4),
    Layout(1, 4, 1),
    Layout(2, 1, 2, zero=1),
    Layout(3, 1, 1),
]


def hosts_of(root: Path, hosts: str) -> list[Path]:
    """Returns the directory for each rank, given the name of each rank's host."""
    return [root / name for name in hosts]


def whole_state(root: Path) -> dict[str, Any]:
    """Trains an unsharded model; returns its state and checkpoint, from which sharded models start."""
    state = trained()
    dist.save(state, root / "whole", step=1)
    return state


def saved(root: Path, hosts: str, layout: Layout, step: int = 1, keep: int = 2) -> None:
    paths = hosts_of(root, hosts)

    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> None:
        state = divided(layout, groups)
        dist.load(state, root / "whole", group=world)
        dist.save(state, paths[world.rank()], step=step, keep=keep, group=world, shared=False)

    ThreadMesh(*layout.shape).run(program)


def restored(root: Path, hosts: str, layout: Layout, expected: dict[str, Any]) -> list[int | None]:
    paths = hosts_of(root, hosts)

    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> int | None:
        state = divided(layout, groups)
        with dist.CheckpointManager(paths[world.rank()], group=world, shared=False) as manager:
            step = manager.restore(state)
        if step is not None:
            require_part(state, expected)
        return step

    return ThreadMesh(*layout.shape).run(program)


@settings(max_examples=examples(4))
@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.data())
def test_any_hosts_put_a_checkpoint_together(tmp_path_factory, first, second, data):
    root = tmp_path_factory.mktemp("disks")
    expected = whole_state(root)
    size, then = (each.replicas * each.stages * each.parts for each in (first, second))
    hosts = "".join(data.draw(st.lists(st.sampled_from("ab"), min_size=size, max_size=size)))
    saved(root, hosts, first)
    others = data.draw(st.permutations(sorted(set(hosts))))
    later = "".join([*others, *"nnnn"][:then])  # a new host has no data
    assert restored(root, later, second, expected) == [1] * then
    for name in set(hosts):
        (step,) = (root / name).glob("step_*")
        manifest = json.loads((step / "manifest.json").read_bytes())
        assert sorted(manifest["here"]) == sorted(file.name for file in step.glob("*.safetensors"))


def test_hosts_are_told_apart_by_their_disks(tmp_path):
    paths = hosts_of(tmp_path, "abab")

    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> Disks:
        return found_disks(Root(paths[world.rank()]), GroupChannel(world))

    found = ThreadMesh(4).run(program)
    assert [each.of for each in found] == [(0, 1, 0, 1)] * 4
    assert [each.is_first for each in found] == [True, True, False, False]
    assert found[3].sharers(3) == [1, 3]
    assert not [*tmp_path.glob("*/*")], "nothing is left"


def test_without_a_host_the_newest_that_is_whole_is_taken(tmp_path, capfd):
    expected = whole_state(tmp_path)
    saved(tmp_path, "aabb", LAYOUTS[1], step=1)
    saved(tmp_path, "aabb", LAYOUTS[1], step=2)
    (newest,) = (tmp_path / "b").glob("step_*2-*")
    shutil.rmtree(newest)
    assert restored(tmp_path, "aabb", LAYOUTS[1], expected) == [1] * 4
    assert "rank_00002_000.safetensors is on no disk that these ranks can access" in capfd.readouterr().err
    with pytest.raises(
        dist.CheckpointError, match=r"contains no complete checkpoint on .*is on no disk .*Start on the hosts"
    ):
        restored(tmp_path, "aaaa", LAYOUTS[1], expected)
    assert restored(tmp_path, "cccc", LAYOUTS[1], expected) == [None] * 4


def test_a_host_that_cannot_publish_fails_the_save_everywhere(tmp_path, monkeypatch):
    expected = whole_state(tmp_path)
    saved(tmp_path, "aabb", LAYOUTS[0], step=1)
    rename = LocalStorage.rename

    def refuse(storage: LocalStorage, old: str, new: str) -> None:
        if storage.describe().endswith("b"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(storage, old, new)

    monkeypatch.setattr(LocalStorage, "rename", refuse)

    def program(world: ThreadGroup, groups: list[ThreadGroup]) -> None:
        path = hosts_of(tmp_path, "aabb")[world.rank()]
        with pytest.raises(dist.CheckpointError, match=r"^rank 2.*/b.*No space left"):
            dist.save({"tensor": torch.ones(1 << 20)}, path, step=2, keep=1, group=world, shared=False)

    ThreadMesh(4).run(program)
    monkeypatch.undo()
    assert restored(tmp_path, "aabb", LAYOUTS[0], expected) == [1] * 4
    saved(tmp_path, "aabb", LAYOUTS[0], step=3, keep=1)
    assert restored(tmp_path, "bbaa", LAYOUTS[0], expected) == [3] * 4
    assert all(len([*(tmp_path / name).glob("step_*")]) == 1 for name in "ab")


def test_damage_on_another_host_is_named_and_the_older_taken(tmp_path, capfd):
    expected = whole_state(tmp_path)
    for step in (1, 2):
        saved(tmp_path, "aabb", LAYOUTS[2], step=step)
    (file,) = (tmp_path / "b").glob("step_*2-*/rank_00003_000.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert restored(tmp_path, "bbaa", LAYOUTS[2], expected) == [1] * 4
    assert f"{file} was changed" in capfd.readouterr().err


def test_an_address_that_all_hosts_reach_is_refused():
    pytest.importorskip("fsspec")
    with pytest.raises(
        ValueError, match=r"shared=False is for disks that hosts do not share; memory://.*all hosts can reach"
    ):
        dist.save({"a": 1}, "memory://run", shared=False)


def test_examples_of_fetching_run():
    assert doctest.testmod(import_module("paceline.train.checkpoint.read")).failed == 0
