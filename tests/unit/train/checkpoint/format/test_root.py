"""A directory of checkpoints: saving, loading, damage reports, retention, and errors that state a solution."""

from __future__ import annotations

import errno
import os
import stat
import struct
from dataclasses import replace

import pytest
from checkpoint_states import newest_whole, save, steps_in, write

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.format.root import Root, listing_of, open_checkpoint


def newest(root: Root) -> str:
    found, skipped = newest_whole(root, digests=True)
    assert found is not None and skipped == []
    return found.name


def test_what_was_saved_is_read(tmp_path):
    root = Root(tmp_path / "a" / "b")
    assert save(root, 3) == newest(root) == "step_0000000003"
    assert steps_in(root, "step_0000000003") == {3}
    assert (tmp_path / "a" / "b" / "latest").read_text() == "step_0000000003\n"
    assert sorted(os.listdir(tmp_path / "a" / "b")) == ["latest", "step_0000000003"]


def test_the_same_step_may_be_saved_again(tmp_path):
    root = Root(tmp_path)
    assert [save(root, 3), save(root, 3)] == ["step_0000000003", "step_0000000003.2"]
    assert newest(root) == "step_0000000003.2"


def test_what_was_saved_last_is_the_newest(tmp_path):
    root = Root(tmp_path)
    save(root, 100)
    save(root, 7)  # training was restarted, or resumed from an older checkpoint
    assert newest(root) == "step_0000000007"


def test_old_ones_are_removed_and_others_left_alone(tmp_path):
    root = Root(tmp_path)
    for step in range(1, 5):
        save(root, step)
    (tmp_path / "step_0000000001").rename(tmp_path / "best")
    assert root.retire(2) == ["step_0000000002"]
    assert sorted(os.listdir(tmp_path)) == ["best", "latest", "step_0000000003", "step_0000000004"]
    assert steps_in(root, "best") == {1}


def test_one_that_is_being_read_is_not_removed(tmp_path):
    root = Root(tmp_path)
    save(root, 1)
    with root.open("step_0000000001"):
        save(root, 2)
        assert root.retire(1) == []
    assert root.retire(1) == ["step_0000000001"]


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    root = Root(tmp_path)
    for step in (1, 2, 3):
        save(root, step)
    os.truncate(tmp_path / "step_0000000003" / "rank_00001_000.safetensors", 50)
    assert root.retire(1) == ["step_0000000001"]
    found, skipped = newest_whole(root)
    assert (
        found is not None and found.name == "step_0000000002" and [each.name for each in skipped] == ["step_0000000003"]
    )


def test_nothing_is_removed_if_none_is_whole(tmp_path):
    root = Root(tmp_path)
    save(root, 1)
    os.truncate(tmp_path / "step_0000000001" / "rank_00001_000.safetensors", 50)
    assert root.retire(1) == [] and newest_whole(root)[0] is None


def test_left_overs_of_dead_saves_are_removed(tmp_path):
    root = Root(tmp_path)
    dead = Root(tmp_path)
    draft = dead.begin(1)
    write(dead, draft, 1, 0)
    assert dead.storage.is_held(draft.directory)
    assert save(root, 2) == newest(root)  # a checkpoint in use is kept
    assert (tmp_path / draft.directory).exists()
    dead.abandon(replace(draft, directory="none"))  # this closes the manifest, as the exit of the process would
    save(root, 3)
    assert not (tmp_path / draft.directory).exists()


def test_a_failed_save_leaves_nothing_behind(tmp_path):
    root = Root(tmp_path)
    draft = root.begin(1)
    part = write(root, draft, 1, 0)
    with pytest.raises(CheckpointError, match="needs one part from each; there are 1, and none from rank 1"):
        root.publish(draft, [part], None, world_size=2)
    root.abandon(draft)
    assert os.listdir(tmp_path) == []


def test_disks_that_hosts_do_not_share_hold_their_own_files(tmp_path):
    first, second = Root(tmp_path / "0"), Root(tmp_path / "1")
    draft = first.begin(9, unique=True, sequence=4)
    second.join(draft)
    parts = [write(root, draft, 9, rank) for rank, root in enumerate((first, second))]
    for root, part in zip((first, second), parts, strict=True):
        root.publish(draft, parts, {"step": 9}, world_size=2, here=list(part.files))
    assert newest(first) == newest(second) == draft.name and first.next_sequence() == 5
    with second.open(draft.name) as checkpoint:
        assert checkpoint.read("model/bias") == struct.pack("<3q", 9, 9, 9)
        with pytest.raises(CheckpointDamagedError, match=r"rank_00000_000.safetensors is on another host"):
            checkpoint.read("model/weight")


def test_directories_that_cannot_be_synced_are_accepted(tmp_path, monkeypatch):
    sync = os.fsync

    def refuse_directories(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    root = Root(tmp_path)
    assert save(root, 1) == newest(root)


def test_an_empty_place_has_no_checkpoint(tmp_path):
    assert newest_whole(Root(tmp_path / "none")) == (None, [])
    with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
        open_checkpoint(tmp_path)


def test_one_that_a_save_removes_meanwhile_is_not_opened(tmp_path, monkeypatch):
    root = Root(tmp_path)
    save(root, 1)
    listings = []

    def list_and_go_on(place):
        listings.append(listing_of(place))
        if len(listings) == 1:
            save(root, 2)
            root.retire(1)
        return listings[-1]

    monkeypatch.setattr("paceline.train.checkpoint.format.root.listing_of", list_and_go_on)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.manifest.step == 2
