"""What a member does for learners: takes snapshots when all have heard of a lesson, and logs what is committed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import torch

from paceline.elastic.connection import LauncherConnection
from paceline.elastic.dealings import Dealt
from paceline.elastic.failpoints import reach
from paceline.elastic.joining.delays import Delays
from paceline.elastic.joining.snapshot import Snapshot
from paceline.elastic.joining.steps import Steps
from paceline.elastic.joining.wire import Entered, Item, Result, Stepped
from paceline.elastic.messages import Donating, Lesson, View
from paceline.elastic.registry import Registry
from paceline.engine.addresses import own_address
from paceline.errors import PacelineError
from paceline.parallel.digests import memory_of
from paceline.security.encryption import identity_of
from paceline.security.levels import chosen_level
from paceline.security.secret import derive_key, job_secret
from paceline.store.tcp import listen

KEY = "lesson of an elastic job"


class Donor:
    """The lessons that this member gives; most of the time there are none.

    Args:
        connection: the worker's connection to its launcher.
        registry: the state.
        steps: of the usual loop, in which learners get the steps of optimizers; otherwise they get results of rounds.
    """

    def __init__(self, connection: LauncherConnection, registry: Registry, steps: Steps | None = None) -> None:
        self._connection = connection
        self._registry = registry
        self._steps = steps
        self._given: dict[int, Snapshot] = {}
        self._delays: dict[int, Delays] = {}

    @property
    def teaches(self) -> bool:
        """Whether there are any."""
        return bool(self._given)

    def begin_batch(self, agreed: int, round_number: int, committed: int, dealt: Dealt) -> None:
        """Begins the lessons that all members have heard of; `agreed` is the largest such number."""
        for number, snapshot in list(self._given.items()):
            began_s = time.monotonic()
            if snapshot.make_room():
                _say(self._delays[number].waited(time.monotonic() - began_s))
        self._forget_those_over()
        for lesson in self._connection.lessons_until(agreed):
            self._begin(lesson, round_number, committed, dealt)
        self._watch_steps(round_number, committed)

    def committed(
        self, round_number: int, result: Sequence[torch.Tensor], digest: int, state: int, before: int, dealt: Dealt
    ) -> None:
        """Logs a round for those who learn."""
        if not self._given:
            return
        if self._steps is not None:
            self._steps.at = round_number + 1, digest
            result = []
        memories = [memory_of(each) for each in result]
        kinds = tuple((str(each.dtype), tuple(each.shape)) for each in result)
        nbytes = sum(map(len, memories))
        self._log(Result(round_number, nbytes, kinds, digest, state, dealt, before), memories)
        reach("join.logged")

    def entering(self, round_number: int, view: View) -> None:
        """Logs that the members enter a view."""
        if self._given:
            self._log(Entered(round_number, view.generation, view.members))

    def close(self) -> None:
        """Ends all lessons; idempotent."""
        for number in list(self._given):
            self._forget(number)

    def _watch_steps(self, round_number: int, committed: int) -> None:
        """Has the steps of optimizers logged from here on, if anybody learns."""
        if self._steps is None:
            return
        self._steps.at = round_number, committed
        if self._given and self._steps.on_step is None:
            self._steps.on_step = self._stepping
        elif not self._given and self._steps.on_step is not None:
            self._steps.on_step = None
            self._steps.forget()

    def _stepping(self, item: Stepped, memories: Sequence[memoryview]) -> None:
        self._log(item, memories)
        reach("join.logged")

    def _log(self, item: Item, memories: Sequence[memoryview] = ()) -> None:
        for snapshot in self._given.values():
            snapshot.log(item, memories)

    def _begin(self, lesson: Lesson, round_number: int, committed: int, dealt: Dealt) -> None:
        reach("join.snapshot")
        address = ""
        try:
            key = derive_key(job_secret(), KEY)
            if chosen_level() == "encrypt":
                identity_of(key)  # made here, so that the fork of a process with threads need not load OpenSSL
            listener = listen(_own_host(), 0, job_secret())
            host, port = listener.getsockname()[:2]
            self._given[lesson.number] = Snapshot(
                lesson.number, self._registry, round_number, committed, dealt, listener, key
            )
            self._delays[lesson.number] = Delays(lesson.learner)
            if self._steps is not None and len(self._given) == 1:  # those who learn already may have other gradients
                self._steps.at = round_number, committed
                self._steps.note(self._registry.parameters)
            address = f"{host}:{port}"
        except (OSError, TypeError, ValueError, PacelineError) as error:
            sys.stderr.write(f"paceline: {self._connection} cannot serve its state to {lesson.learner}: {error}\n")
        reach("join.serving")
        self._connection.send(Donating(lesson.number, round_number, address))

    def _forget_those_over(self) -> None:
        for number in [number for number, snapshot in self._given.items() if snapshot.is_over]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._given.pop(number).close()
        _say(self._delays.pop(number).over())


def _say(text: str | None) -> None:
    if text is not None:
        sys.stderr.write(f"paceline: {text}\n")


def _own_host() -> str:
    """Returns the address at which the other workers reach this one."""
    kind, _, place = os.environ.get("PACELINE_STORE", "").partition(":")
    if kind != "tcp":
        return "127.0.0.1"
    host = place.rpartition(":")[0].strip("[]")
    return host if host.startswith("127.") else own_address(host)
