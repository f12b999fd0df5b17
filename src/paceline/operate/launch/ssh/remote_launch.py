"""State machine for the launchers started by `paceline run --hosts`. Uses neither processes nor a clock.

A launcher starts, reports that it is ready, and receives its assignment. The launcher on the first machine reports the
rendezvous address, which the other assignments include. If a launcher fails before it has received its assignment, the
job ends. Afterwards, the launchers end the job themselves, as in any job on several machines, and are killed if they do
not exit in time. Explanations of failed starts are derived from the output of ssh and the remote shell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from msgspec import structs

from paceline.operate.launch.ssh.protocol import (
    FromLauncher,
    LauncherExited,
    LauncherReady,
    NodeAssignment,
    RendezvousAddress,
    Signal,
    ToLauncher,
)

_SSH_FAILED = 255
_NOT_FOUND = (126, 127)
PATIENCE_S = 5.0  # time for launchers to exit on their own after a launcher was lost
OTHER_REASONS_S = 2.0  # time for other launchers to report failed starts after the first failed start
MARGIN_S = 15.0  # time added to the workers' shutdown timeout
WRONG_FLAGS = 2  # exit code of a launcher that has not started anything


@dataclass(frozen=True)
class LaunchAttempt:
    """Parameters for starting one launcher."""

    destination: str  # destination argument for ssh
    python: str  # Python interpreter on the remote machine
    version: str  # version of Paceline on the local machine
    is_here: bool = False  # whether the launcher runs on the local machine, without ssh

    def command(self, words: str) -> str:
        """Returns the command that the user can enter here to run Python with `words` on the machine."""
        return f"{self.python} {words}" if self.is_here else f"ssh {self.destination} {self.python} {words}"

    @property
    def installation(self) -> str:
        """The command that the user can enter here to install the same version of Paceline on the machine."""
        return self.command(f"-m pip install paceline=={self.version}")


class LauncherPhase(Enum):
    """The phase of a launcher."""

    STARTED = auto()
    ANSWERED = auto()
    ASSIGNED = auto()
    ENDED = auto()


@dataclass(frozen=True)
class SendMessage:
    """Action: send a message to the launcher."""

    machine: int
    message: ToLauncher


@dataclass(frozen=True)
class Disconnect:
    """Action: close the connection to the launcher, which then exits."""

    machine: int


@dataclass(frozen=True)
class ShowText:
    """Action: print a sentence for the user."""

    text: str


Action = SendMessage | Disconnect | ShowText


class RemoteLaunch:
    """The state of all launchers.

    `parts` are the assignments, without the address of the rendezvous. `start_s` is the time limit for starting all
    launchers, and `shutdown_s` the limit for stopping the workers.
    """

    def __init__(
        self,
        parts: Sequence[NodeAssignment],
        attempts: Sequence[LaunchAttempt],
        start_s: float,
        shutdown_s: float,
        now_s: float,
        is_elastic: bool = False,
    ) -> None:
        self._parts = list(parts)
        self._attempts = list(attempts)
        self._start_s = start_s
        self._shutdown_s = shutdown_s
        self._is_elastic = is_elastic  # whether the job continues when machines are lost
        self._phases = [LauncherPhase.STARTED] * len(parts)
        self._codes: list[int | None] = [None] * len(parts)
        self._rendezvous: tuple[str, int] | None = None
        self._actions: list[Action] = []
        self._is_failing = False  # whether a launcher failed to start
        self._is_ending = False  # whether all launchers have been asked to exit
        self._code = 0
        self._start_by_s: float | None = now_s + start_s
        self._end_by_s: float | None = None  # time at which to request that the launchers exit
        self._cut_by_s: float | None = None  # time at which to disconnect launchers

    @property
    def is_over(self) -> bool:
        """Whether every launcher has exited."""
        return all(phase is LauncherPhase.ENDED for phase in self._phases)

    @property
    def exit_code(self) -> int:
        """The first nonzero exit code; for an elastic job, the exit code of the launcher that exited last."""
        return self._code

    @property
    def deadline_s(self) -> float | None:
        """The time at which `tick` must be called; None for never."""
        deadlines = (self._start_by_s, self._end_by_s, self._cut_by_s)
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def take_actions(self) -> list[Action]:
        """Removes and returns the actions to perform, in order."""
        actions, self._actions = self._actions, []
        return actions

    def receive(self, machine: int, message: FromLauncher, now_s: float) -> None:
        """Handles a message from a launcher."""
        match message:
            case LauncherReady() if self._phases[machine] is LauncherPhase.STARTED:
                self._on_hello(machine, message, now_s)
            case RendezvousAddress(host, port) if machine == 0 and self._rendezvous is None:
                self._rendezvous = host, port
                for other in range(1, len(self._parts)):
                    self._assign(other)
            case LauncherExited(code):
                self._codes[machine] = code

    def ended(self, machine: int, code: int, errors: str, now_s: float) -> None:
        """Handles the exit of a launcher or its ssh process, given the exit code and the last output on stderr."""
        phase, self._phases[machine] = self._phases[machine], LauncherPhase.ENDED
        own = self._codes[machine]
        if phase is not LauncherPhase.ASSIGNED:
            self._fail([explain_failed_launch(self._attempts[machine], code, errors)], now_s)
        elif own is None:
            self._on_loss(machine, now_s)
        elif machine == 0 and self._rendezvous is None and len(self._parts) > 1:
            self._code = self._code or own
            self._end_by(now_s)  # the other launchers would wait forever
        elif self._is_elastic and not self._is_ending:
            self._code = own
        elif own != 0:
            self._code = self._code or own
            self._end_by(now_s + (1.0 if own == WRONG_FLAGS else self._shutdown_s + PATIENCE_S))
        if self.is_over:
            self._start_by_s = self._end_by_s = self._cut_by_s = None

    def signaled(self, name: str, now_s: float) -> None:
        """Handles a terminating signal from the user or the scheduler."""
        self._is_ending = True
        self._code = self._code or 1
        for machine, phase in enumerate(self._phases):
            if phase is LauncherPhase.ASSIGNED:
                self._actions.append(SendMessage(machine, Signal(name)))
            elif phase is not LauncherPhase.ENDED:
                self._actions.append(Disconnect(machine))
        self._start_by_s = self._end_by_s = None
        if self._cut_by_s is None:
            self._cut_by_s = now_s + self._shutdown_s + MARGIN_S

    def tick(self, now_s: float) -> None:
        """Performs the actions that are due."""
        if self._start_by_s is not None and now_s >= self._start_by_s:
            late = [machine for machine, phase in enumerate(self._phases) if phase is LauncherPhase.STARTED] or [0]
            self._fail([no_answer(self._attempts[machine], self._start_s) for machine in late], now_s)
        if self._end_by_s is not None and now_s >= self._end_by_s:
            self.signaled("SIGTERM", now_s)
        if self._cut_by_s is not None and now_s >= self._cut_by_s:
            self._cut_by_s = None
            running = [machine for machine, phase in enumerate(self._phases) if phase is not LauncherPhase.ENDED]
            self._actions += map(Disconnect, running)

    def _on_hello(self, machine: int, hello: LauncherReady, now_s: float) -> None:
        attempt = replace(self._attempts[machine], python=hello.python)
        self._phases[machine] = LauncherPhase.ANSWERED
        if hello.version != attempt.version:
            self._fail([other_version(attempt, hello.version)], now_s)
        else:
            self._assign(machine)

    def _assign(self, machine: int) -> None:
        """Sends a launcher its assignment if the launcher is ready and the rendezvous address is known."""
        if self._phases[machine] is not LauncherPhase.ANSWERED or self._is_failing or self._is_ending:
            return
        if machine == 0 or self._rendezvous is not None:
            self._phases[machine] = LauncherPhase.ASSIGNED
            rendezvous = None if machine == 0 else self._rendezvous
            self._actions.append(SendMessage(machine, structs.replace(self._parts[machine], rendezvous=rendezvous)))
        has_all = all(phase in (LauncherPhase.ASSIGNED, LauncherPhase.ENDED) for phase in self._phases)
        if has_all and (self._rendezvous is not None or len(self._parts) == 1):
            self._start_by_s = None

    def _on_loss(self, machine: int, now_s: float) -> None:
        destination = self._attempts[machine].destination
        if not self._is_ending:
            broke = "" if self._attempts[machine].is_here else ", or the ssh connection to it broke"
            text = f"{destination}: its launcher was killed{broke}; its workers are being terminated there"
            self._actions.append(ShowText(text))
        self._code = self._code or 1
        if not self._is_elastic or (machine == 0 and self._rendezvous is None):
            self._end_by(now_s + PATIENCE_S)

    def _fail(self, reasons: Sequence[str], now_s: float) -> None:
        """Ends the job after launchers failed to start, once the others have had time to report their own failures."""
        if self._is_ending:
            return  # the launcher failed because the job is already ending
        self._actions += [ShowText(reason) for reason in reasons]
        self._code, self._is_failing, self._start_by_s = self._code or 1, True, None
        if LauncherPhase.STARTED in self._phases:
            self._end_by(now_s + OTHER_REASONS_S)
        else:
            self.signaled("SIGTERM", now_s)

    def _end_by(self, end_by_s: float) -> None:
        """Sets the deadline for the other launchers to exit on their own."""
        if not self._is_ending:
            self._end_by_s = end_by_s if self._end_by_s is None else min(self._end_by_s, end_by_s)


def explain_failed_launch(attempt: LaunchAttempt, code: int, errors: str) -> str:
    """Returns a sentence for the user about a launcher that failed to start.

    `code` is the exit code of ssh, or of the interpreter if ssh was not used, and `errors` the output on stderr.
    """
    if code == _SSH_FAILED and not attempt.is_here:
        return f"{attempt.destination}: {_of_ssh(attempt, errors)}"
    there = f"{attempt.destination}: {attempt.python}"
    if "No module named" in errors and "paceline" in errors:
        return f"{there} there has no paceline {attempt.version}; install it: {attempt.installation}"
    if code in _NOT_FOUND:
        return (
            f"{there} does not exist there; install the same environment as here, or specify the interpreter with "
            "--remote-python"
        )
    return (
        f"{attempt.destination}: the launcher exited with code {code} before it answered: {_last(errors)}; try: "
        f"{attempt.command('-m paceline --version')}"
    )


def other_version(attempt: LaunchAttempt, version: str) -> str:
    """Returns a sentence about a machine that has a different version of Paceline."""
    return (
        f"{attempt.destination}: {attempt.python} has paceline {version} there, and this machine has "
        f"{attempt.version}; all machines of a job need the same: {attempt.installation}"
    )


def no_answer(attempt: LaunchAttempt, waited_s: float) -> str:
    """Returns a sentence about a machine that did not respond in time."""
    return (
        f"{attempt.destination}: no launcher answered within {waited_s:.0f} s; try: "
        f"{attempt.command('-m paceline --version')}"
    )


def _of_ssh(attempt: LaunchAttempt, errors: str) -> str:
    destination = attempt.destination
    if "IDENTIFICATION HAS CHANGED" in errors:
        return (
            "its host key differs from the one known to this machine, so it may be a different machine; if the change "
            f"is expected, remove the old key with ssh-keygen -R {destination.rpartition('@')[2]}"
        )
    if "Host key verification failed" in errors or "host key is known" in errors:
        return f"its host key is not known here; compare it and accept it once, with: ssh {destination} true"
    if "Permission denied" in errors or "Too many authentication failures" in errors:
        return (
            f"it rejected this user's key, and there is no prompt for a password: ssh-copy-id {destination}, or load "
            "the key with ssh-add"
        )
    if "Could not resolve" in errors:
        return "its name cannot be resolved; correct it in --hosts, or set its HostName in ~/.ssh/config"
    if "Connection refused" in errors:
        return "no ssh server listens there; start sshd, or set its Port in ~/.ssh/config"
    if any(words in errors for words in ("timed out", "No route to host", "Network is unreachable")):
        return f"it cannot be reached ({_last(errors)}); is it running, and does a firewall let ssh through?"
    return f"ssh failed ({_last(errors)}); try: ssh {destination} true"


def _last(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
