"""Storage without rename: the manifest is written last, so an interrupted save leaves earlier checkpoints intact."""

from __future__ import annotations

import builtins

import pytest
from checkpoint_states import newest_whole, save, steps_in

from paceline.errors import CheckpointError
from paceline.train.checkpoint.format.local_storage import open_storage
from paceline.train.checkpoint.format.root import Root, open_checkpoint
from paceline.train.checkpoint.format.storage import FsspecStorage


class Ended(BaseException):
    """Simulates the end of the process; no cleanup follows."""


class EndingPlace(FsspecStorage):
    """Fails at a given operation; files that were not closed do not exist, as in an object store."""

    left = 10**9

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Ended

    def create(self, name):
        self._count()
        return _Closed(self, name, super().create)

    def remove(self, name):
        self._count()
        super().remove(name)


class _Closed:
    def __init__(self, place, name, create) -> None:
        self.place, self.name, self.create, self.data = place, name, create, b""

    def write(self, views):
        self.place._count()
        self.data += b"".join(views)

    def commit(self):
        self.place._count()
        file = self.create(self.name)
        file.write([memoryview(self.data)])
        file.commit()

    def close(self):
        pass


@pytest.fixture
def address(request) -> str:
    return f"memory://{request.node.name}"


def test_a_save_that_ends_anywhere_loses_nothing(address):
    number = latest = step = 0
    while True:
        number, step = number + 1, step + 1
        place = EndingPlace(address)
        place.left = number
        has_ended = False
        try:
            save(Root(place), step)
            latest = step
            Root(place).retire(2)
        except Ended:
            has_ended = True
        found, _ = newest_whole(Root(address), digests=True)
        assert found is not None or latest == 0
        if found is not None:
            assert (
                found.step is not None and found.step >= latest and steps_in(Root(address), found.name) == {found.step}
            )
        if not has_ended:
            break
    assert number > 15 and len(Root(address).listing()) == 2


def test_an_address_is_opened_like_a_path(address):
    save(Root(address), 4)
    name = save(Root(address), 4)
    assert name == "step_0000000004.2"
    assert Root(address).storage.describe(name) == f"{address}/step_0000000004.2"
    with open_checkpoint(f"{address}/{name}") as checkpoint, open_checkpoint(address) as newest:
        assert checkpoint.manifest == newest.manifest


def test_an_address_of_an_unknown_kind_is_refused():
    with pytest.raises(CheckpointError, match=r"nowhere://x is not an address that fsspec supports"):
        open_storage("nowhere://x")


def test_without_fsspec_the_error_names_the_extra(monkeypatch):
    original = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("fsspec"):
            raise ImportError("No module named 'fsspec'")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(CheckpointError, match=r"pip install 'paceline\[fsspec\]'"):
        open_storage("s3://bucket/run")


def test_a_file_address_is_a_path(tmp_path):
    assert open_storage(f"file://{tmp_path}").renames
