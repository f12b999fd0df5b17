"""Groups for planned views form before these views are entered, and are discarded if a forced view comes first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from launching import wait_until

from paceline.comm.group.default import own_world
from paceline.comm.store.tcp_store import StoreServer
from paceline.train.elastic.agreement import LOST_MEMBER_ERRORS, BatchAssignment, MemberStatus
from paceline.train.elastic.protocol import View
from paceline.train.elastic.worker.view_group import ViewGroups, exchange_statuses

ME, OTHER = "0.0.0", "0.1.0"


class Launcher:
    """A mock of the messages that a worker receives from its launcher."""

    def __init__(self) -> None:
        self.name = ME
        self._views: list[View] = []
        self._on_view: Callable[[View], None] | None = None

    def set_view_handler(self, on_view: Callable[[View], None] | None) -> None:
        self._on_view = on_view
        for view in self._views if on_view is not None else []:
            on_view(view)

    def tell(self, generation: int, *members: str, is_planned: bool = True) -> View:
        view = View(generation, members, is_planned)
        self._views.append(view)
        if self._on_view is not None:
            self._on_view(view)
        return view


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    monkeypatch.setenv("PACELINE_STORE", f"unix:{tmp_path}/store")
    monkeypatch.setenv("PACELINE_SECRET", "42" * 32)
    server = StoreServer.on_unix_path(f"{tmp_path}/store", b"42" * 32)
    try:
        yield Launcher()
    finally:
        server.close()


@pytest.fixture
def view_groups(launcher: Launcher) -> Iterator[ViewGroups]:
    made = ViewGroups(launcher)
    try:
        yield made
    finally:
        made.leave()
        assert not forming(), "a thread is left"


def forming() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "paceline-view-group"]


def require_works(group: object) -> None:
    world = own_world()
    assert world is not None
    assert world.group is group
    total = torch.ones(3)
    world.group.all_reduce(total)
    assert total.tolist() == [1.0, 1.0, 1.0]


def test_a_planned_view_forms_beside_the_one_before(launcher: Launcher, view_groups: ViewGroups) -> None:
    first = view_groups.enter(launcher.tell(1, ME, is_planned=False))
    planned = launcher.tell(2, ME)
    wait_until(lambda: not forming())
    require_works(first)
    second = view_groups.enter(planned)
    assert second is not first
    require_works(second)


def test_a_view_is_acted_on_when_its_group_is_there(launcher: Launcher, view_groups: ViewGroups) -> None:
    view_groups.enter(launcher.tell(1, ME, is_planned=False))
    launcher.tell(4, ME, OTHER)
    assert view_groups.acts_up_to(6) == 1, "the other worker has not come, and what follows has to wait too"
    launcher.tell(5, ME, is_planned=False)
    wait_until(lambda: view_groups.acts_up_to(6) == 6)
    launcher.tell(7, ME)
    wait_until(lambda: view_groups.acts_up_to(7) == 7)
    require_works(view_groups.enter(View(7, (ME,), is_planned=True)))


def test_a_group_that_does_not_form_is_awaited_for_a_while(
    launcher: Launcher, view_groups: ViewGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.tell(4, ME, OTHER)
    assert view_groups.acts_up_to(4) == 0
    monkeypatch.setattr("paceline.train.elastic.worker.view_group._HEAD_START_S", 0.0)
    assert view_groups.acts_up_to(4) == 4
    assert forming(), "it still waits for the other worker"


def test_a_forced_view_ends_a_planned_one_that_forms(launcher: Launcher, view_groups: ViewGroups) -> None:
    launcher.tell(2, ME, OTHER)
    assert forming(), "it waits for the other worker"
    require_works(view_groups.enter(launcher.tell(3, ME, is_planned=False)))
    wait_until(lambda: not forming())


def test_a_planned_view_that_was_replaced_cannot_be_entered(launcher: Launcher, view_groups: ViewGroups) -> None:
    planned = launcher.tell(2, ME, OTHER)
    forced = launcher.tell(3, ME, is_planned=False)
    with pytest.raises(LOST_MEMBER_ERRORS):
        view_groups.enter(planned)
    require_works(view_groups.enter(forced))


def test_views_that_are_over_or_of_others_are_not_prepared(launcher: Launcher, view_groups: ViewGroups) -> None:
    launcher.tell(2, OTHER)
    view_groups.enter(launcher.tell(4, ME, is_planned=False))
    launcher.tell(3, ME, OTHER)
    view_groups.prepare_no_more()
    launcher.tell(5, ME, OTHER)
    assert not forming()


@pytest.mark.parametrize("shards", [2, 2000])
def test_statuses_of_any_length_are_exchanged(launcher: Launcher, view_groups: ViewGroups, shards: int) -> None:
    group = view_groups.enter(launcher.tell(1, ME, is_planned=False))
    status = MemberStatus(3, tuple((at, at + 1) for at in range(shards)), dealt=BatchAssignment(2, (ME, OTHER)))
    assert exchange_statuses(group, status) == [status]


def test_what_was_prepared_ends_with_the_loop(launcher: Launcher, view_groups: ViewGroups) -> None:
    group = view_groups.enter(launcher.tell(1, ME, is_planned=False))
    launcher.tell(2, ME, OTHER)
    view_groups.prepare_no_more()
    wait_until(lambda: not forming())
    require_works(group)
