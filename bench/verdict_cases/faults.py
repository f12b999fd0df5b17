"""The classes of faults, and the patterns of sentences that report the right rank and cause."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A class of faults.

    Attributes:
        name: The program's argument that selects the fault.
        right: A pattern that matches the right sentence; BAD is replaced by the rank.
        torchs: A pattern that matches the right output of torch's analyzer. It contains only the rank, because the
            analyzer does not report causes.
        hosts: The host counts with which the fault is tested, or () for all.
        at_the_end: True if the launcher reports the fault when the job ends instead of while it runs.
        is_alone: True if nothing else may run at the same time.
    """

    name: str
    right: str
    torchs: str = r"missing ranks: \{BAD\}|Missing dump files from ranks \{BAD\}|[Cc]ulprit rank\(?s?\)?:? *\{?\[?BAD\b"
    hosts: tuple[int, ...] = ()
    at_the_end: bool = False
    is_alone: bool = False

    def is_right(self, text: str, bad: int) -> bool:
        """Returns True if one of the lines reports the right rank and cause."""
        return re.search(self.right.replace("BAD", str(bad)), text) is not None


_THERE = r"rank BAD has not reached this call: it is "
FAULTS = (
    Fault("skip", r"rank BAD called broadcast.*it skipped all_reduce"),
    Fault("extra", r"rank BAD called all_reduce.*twice"),
    Fault("shape", r"rank BAD called all_reduce\(float32, 77\).*differs"),
    Fault("order", r"rank BAD called broadcast.*(a different order|or calls it later)"),
    Fault("stop", _THERE + "stopped by a signal"),
    Fault("kill", r"rank BAD failed: killed by SIGKILL"),
    Fault("loader", _THERE + r"in DataLoader\.__next__"),
    Fault("stuck", _THERE + r"in happen \(program\.py"),
    Fault("deadlock", r"deadlock: .*no\. \d of 2.*no\. \d of 2"),
    Fault("raise", r"rank BAD failed: ValueError: bad sample"),
    Fault("root", r"rank BAD called broadcast\(float32, 128, root BAD\).*its root differs"),
    Fault("dtype", r"rank BAD called all_reduce\(float64, 4096\).*differs"),
    Fault("leave", r"rank BAD exited too early, with exit code 0 \(.*program\.py"),
    Fault("exit", r"rank BAD failed: exit code 3"),
    Fault("crash", r"rank BAD failed: killed by SIGSEGV \(program\.py"),
    Fault("sleep", _THERE + r"in happen \(program\.py"),
    Fault("lock", _THERE + r"in happen \(program\.py"),
    Fault("child", _THERE + r"in subprocess\.run \(program\.py"),
    Fault("thread", r"rank BAD .*one of its threads has ended with ValueError: bad sample"),
    Fault("receive", r"deadlock: .*rank BAD waits in recv\(float32, 128, peer 0\) \(program\.py"),
    Fault("group", r"deadlock: .*rank BAD waits in new_group\(\).*\(program\.py"),
    Fault("memory", r"rank BAD failed: killed by the kernel, out of memory", hosts=(1,), is_alone=True),
    Fault("slow_core", r"rank BAD needed .*computed more slowly", at_the_end=True, is_alone=True),
    Fault("slow_link", r"the network between h0, h1 took", hosts=(2,), at_the_end=True, is_alone=True),
)
HEALTHY = ("evaluate", "save", "compile")
ACCUSATION = re.compile(
    r"has not reached this call|did not reach the call|did not reach this call|deadlock|as call \d|failed|"
    r"it has not completed|confidence|the network between"
)
NO_ERROR = "This is not an error"


def is_accused(text: str) -> bool:
    """Returns True if a line reports a problem."""
    return any(ACCUSATION.search(line) and NO_ERROR not in line for line in text.splitlines())
