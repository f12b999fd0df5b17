"""`ChaosRunner`: applies the random actions of `--chaos` to this machine's workers, and reports their effects."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from paceline.linux import pidfd_getfd
from paceline.operate.launch.elastic.worker_pool import PoolWorker
from paceline.operate.launch.elastic_options import Chaos, ChaosAction, actions_of


def disconnect_worker(pid: int, pidfd: int) -> int:
    """Shuts down a process's TCP connections to other machines, like a router that drops them; returns their number.

    Raises an OSError if the kernel denies access to the process.
    """
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        if not _is_socket(f"/proc/{pid}/fd/{name}"):
            continue
        with socket.socket(fileno=pidfd_getfd(pidfd, int(name))) as connection, contextlib.suppress(OSError):
            if _leads_elsewhere(connection):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _is_socket(link: str) -> bool:
    try:
        return os.readlink(link).startswith("socket:")
    except OSError:  # the descriptor was closed in the meantime
        return False


def _leads_elsewhere(connection: socket.socket) -> bool:
    """Returns True if a socket is an established TCP connection to another machine."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    return bool(connection.getsockname()[0] != connection.getpeername()[0])


@dataclass
class _Loss:
    """The loss of a worker, and the other workers that have not entered a new view since the loss."""

    since_s: float
    behind: set[str]
    pause_s: float | None = None


@dataclass
class ChaosStats:
    """Counts of the actions so far, and the recovery time after each loss of a worker."""

    began_s: float
    actions: Counter[str] = field(default_factory=Counter)
    replaced_s: list[float] = field(default_factory=list)  # time from each loss until the replacement enters a view
    pauses_s: list[float] = field(default_factory=list)  # time from each loss until the other workers enter a new view
    _losses: dict[int, _Loss] = field(default_factory=dict)  # losses that do not have a replacement yet, by slot

    def acted(self, kind: str) -> None:
        """Counts an action."""
        self.actions[kind] += 1

    def lost(self, slot: int, others: set[str], now_s: float) -> None:
        """Records that the worker in a slot has exited while the workers `others` were participating."""
        for loss in self._losses.values():
            loss.behind &= others
        self._losses[slot] = _Loss(now_s, set(others))

    def entered(self, slot: int, uid: str, is_new: bool, now_s: float) -> None:
        """Records that a worker has entered a view; `is_new` marks the worker's first view."""
        if is_new and slot in self._losses:
            self.replaced_s.append(now_s - self._losses.pop(slot).since_s)
        for loss in self._losses.values():
            if uid in loss.behind:
                loss.behind.discard(uid)
                if not loss.behind:
                    self.pauses_s.append(now_s - loss.since_s)

    def summary(self, title: str, now_s: float) -> list[str]:
        """Returns the lines of the summary for the user."""
        count = sum(self.actions.values())
        kinds = ", ".join(f"{kind} {times}" for kind, times in sorted(self.actions.items())) or "none"
        lines = [f"chaos ({title}): {count} actions in {now_s - self.began_s:.1f} s ({kinds})"]
        lines.append(
            f"chaos: {len(self.replaced_s)} workers replaced{_spread(self.replaced_s, 'until each participated')}"
        )
        if self.pauses_s:
            lines.append(f"chaos: the others resumed{_spread(self.pauses_s, 'after each loss')}")
        if self._losses:
            slots = ", ".join(map(str, sorted(self._losses)))
            lines.append(f"chaos: the last worker of slot {slots} had not been replaced when the job ended")
        return lines


def _spread(values_s: list[float], what: str) -> str:
    if not values_s:
        return ""
    return f"; {what}: median {median(values_s):.2f} s, longest {max(values_s):.2f} s"


# A stopped worker is resumed after this time, because the launcher does not kill the last worker that has the state.
_CONTINUES_AFTER_S = 5.0
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class ChaosRunner:
    """Applies chaos actions to the workers on one machine. Starts when the first of these workers enters a view.

    `machine` determines the random times. `spared` participating workers are spared, because the training state is lost
    if none remains.
    """

    def __init__(self, chaos: Chaos, machine: int, spared: int, print_line: Callable[[str], None]) -> None:
        self._chaos = chaos
        self._spared = spared
        self._actions = actions_of(chaos, machine)
        self._next: ChaosAction = next(self._actions)
        self._print_line = print_line
        self._ledger: ChaosStats | None = None
        self._hit: set[str] = set()
        self._stopped: list[tuple[float, PoolWorker]] = []  # stopped workers, each with the time at which to resume it

    @property
    def deadline_s(self) -> float | None:
        """The time (monotonic) of the next action, or None before the first worker has entered a view."""
        if self._ledger is None:
            return None
        return min([self._ledger.began_s + self._next.at_s, *(at_s for at_s, _ in self._stopped)])

    def tick(self, now_s: float, members: Sequence[PoolWorker]) -> None:
        """Performs the actions that are due."""
        while self._stopped and now_s >= self._stopped[0][0]:
            self._stopped.pop(0)[1].signal(signal.SIGCONT)
        while self._ledger is not None and now_s >= self._ledger.began_s + self._next.at_s:
            action, self._next = self._next, next(self._actions)
            candidates = [worker for worker in members if _takes_part(worker) and worker.uid not in self._hit]
            if len(candidates) <= self._spared:
                continue
            victim = action.victim_of(candidates)
            if self._do(action, victim):
                self._ledger.acted(action.kind)
                if action.kind == "stop":
                    self._stopped.append((now_s + _CONTINUES_AFTER_S, victim))

    def entered(self, member: PoolWorker, is_new: bool, now_s: float) -> None:
        """Records that a worker has entered a view."""
        if self._ledger is None:
            self._ledger = ChaosStats(now_s)
        self._ledger.entered(member.number, member.uid, is_new, now_s)

    def lost(self, member: PoolWorker, members: Sequence[PoolWorker], now_s: float) -> None:
        """Records the exit of a worker that is about to be replaced."""
        if self._ledger is not None:
            others = {worker.uid for worker in members if _takes_part(worker) and worker is not member}
            self._ledger.lost(member.number, others, now_s)

    def summary(self, now_s: float) -> list[str]:
        """Returns lines for the user about the actions and their effects."""
        if self._ledger is None:
            return [f"chaos ({self._chaos}): nothing was done because no worker participated"]
        return self._ledger.summary(str(self._chaos), now_s)

    def _do(self, action: ChaosAction, member: PoolWorker) -> bool:
        """Performs an action on a worker; returns whether that was possible."""
        assert member.worker is not None
        when = f"chaos at {action.at_s:.2f} s: {action.kind}"
        try:
            if action.kind == "cut":
                count = disconnect_worker(member.worker.pid, member.worker.pidfd)
                self._print_line(f"{when} {count} connections of {member} to other machines")
                return count > 0
            os.kill(member.worker.pid, _SIGNALS[action.kind])
        except OSError as error:
            self._print_line(f"{when} is not possible for {member}: {error}")
            return False
        self._hit.add(member.uid)
        self._print_line(f"{when} {member}")
        return True


def _takes_part(member: PoolWorker) -> bool:
    life = member.life
    return member.runs and life.took_part_s is not None and not life.is_leaving and not life.has_finished
