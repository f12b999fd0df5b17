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
from paceline.elastic.joining.wire import Entered, Item, Result
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
    """The lessons that this member gives; most of the time there are none."""

    def __init__(self, connection: LauncherConnection, registry: Registry) -> None:
        self._connection = connection
        self._registry = registry
        self._given: dict[int, Snapshot] = {}
        self._delays: dict[int, Delays] = {}

    def begin_batch(self, agreed: int, round_number: int, committed: int, dealt: Dealt) -> None:
        """Begins the lessons that all members have heard of; `agreed` is the largest such number."""
        for number, snapshot in list(self._given.items()):
            began_s = time.monotonic()
            if snapshot.make_room():
                _say(self._delays[number].waited(time.monotonic() - began_s))
        self._forget_those_over()
        for lesson in self._connection.lessons_until(agreed):
            self._begin(lesson, round_number, committed, dealt)

    def committed(
        self, round_number: int, result: Sequence[torch.Tensor], digest: int, state: int, dealt: Dealt
    ) -> None:
        """Logs a result for those who learn."""
        if self._given:
            memories = [memory_of(each) for each in result]
            kinds = tuple((str(each.dtype), tuple(each.shape)) for each in result)
            nbytes = sum(map(len, memories))
            self._log(Result(round_number, nbytes, kinds, digest, state, dealt), memories)
            reach("join.logged")

    def entering(self, round_number: int, view: View) -> None:
        """Logs that the members enter a view."""
        if self._given:
            self._log(Entered(round_number, view.generation, view.members))

    def close(self) -> None:
        """Ends all lessons; idempotent."""
        for number in list(self._given):
            self._forget(number)

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
