"""What a calibration holds: the times, bytes and links of one script, in a small file that people can edit.

The file is JSON. Each name ends with its unit; `docs/plan.md` describes every entry.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.schedule.network import Link

VERSION = 1


class CalibrationError(ValueError):
    """A file is no calibration, or one of another version, or holds what cannot be."""


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient, in the order in which the module registers parameters.

    Attributes:
        name: the parameter's.
        dtype: such as "float32"; gradients of different types are never in one bucket.
        ready_s: when it is complete, counted from the beginning of backward.
    """

    name: str
    nbytes: int
    dtype: str
    ready_s: float


@dataclass(frozen=True)
class Times:
    """The medians of a step's parts on one rank that waits for nobody, in seconds.

    Attributes:
        data_s: waiting for the loader.
        forward_s: one forward; `backward_s` one backward, until the last gradient is there.
        rest_s: everything else: the loss, logging, clearing gradients.
    """

    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    rest_s: float


@dataclass(frozen=True)
class Memory:
    """The bytes of a rank.

    Attributes:
        other_nbytes: the rest of the largest resident memory: the interpreter, libraries, activations and data.
    """

    parameter_nbytes: int
    gradient_nbytes: int
    optimizer_nbytes: int
    other_nbytes: int


@dataclass(frozen=True)
class HostCall:
    """How long an all-reduce took among so many ranks of one host."""

    ranks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class PairLink:
    """The link between two hosts, by their numbers in the order of the ranks.

    Its rate is what one connection attained, losses included; `loss` says how many segments were sent again.
    """

    first: int
    second: int
    link: Link


@dataclass(frozen=True)
class Links:
    """The links that were measured or given.

    Attributes:
        within_host: between two ranks of a host.
        node: between a host and the network; None if it is not known.
        region: between a group of hosts, such as a rack or a region, and the others; None without groups.
        reduction_s_per_byte: how long it takes to add a byte to a sum.
        host_calls: all-reduces on one host, which do not follow a schedule.
        pairs: the links between the measured hosts; none unless there were several.
    """

    within_host: Link
    node: Link | None
    region: Link | None
    reduction_s_per_byte: float
    host_calls: tuple[HostCall, ...] = ()
    pairs: tuple[PairLink, ...] = ()


@dataclass(frozen=True)
class Origin:
    """Where a calibration comes from, for those who read it later."""

    command: tuple[str, ...]
    date: str
    host: str
    cores: int
    threads: int
    together: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Calibration:
    """What is known of a script.

    Attributes:
        version: of the file's format.
        step_s: the seconds of each measured step on its own, whose spread tells how ranks wait for each other.
        samples: how many samples a rank trains on in a step; None if that is not known.
        forwards: how many forwards there are in a step, more than one with gradient accumulation.
        bucket_nbytes: the largest bytes of the first bucket, the second, and so on; the last is for all others.
        overlaps: whether gradients are averaged while backward goes on.
        buffer_nbytes: the buffers that rank 0 sends to all ranks before each forward.
    """

    version: int
    origin: Origin
    times: Times
    step_s: tuple[float, ...]
    samples: float | None
    forwards: int
    gradients: tuple[Gradient, ...]
    bucket_nbytes: tuple[int, ...]
    overlaps: bool
    buffer_nbytes: int
    memory: Memory
    links: Links

    @property
    def alone_s(self) -> float:
        """A step on one rank that waits for nobody."""
        times = self.times
        return times.data_s + self.forwards * (times.forward_s + times.backward_s) + times.optimizer_s + times.rest_s

    @property
    def gradient_nbytes(self) -> int:
        """The bytes of all gradients."""
        return sum(gradient.nbytes for gradient in self.gradients)


def encode(calibration: Calibration) -> bytes:
    """Returns the file's content."""
    return msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n"


def decode(content: bytes, name: str = "the calibration") -> Calibration:
    """Returns the calibration in a file's content.

    Raises:
        CalibrationError: there is none in it; the message names the entry that is wrong.
    """
    try:
        version = msgspec.json.decode(content, type=dict[str, object]).get("version")
        if version != VERSION:
            raise CalibrationError(
                f"{name} is of version {version}, and this version of Paceline reads {VERSION}; measure again with "
                "`paceline plan --measure -- SCRIPT`"
            )
        found = msgspec.json.decode(content, type=Calibration)
    except msgspec.MsgspecError as error:
        raise CalibrationError(f"{name} is not a calibration that `paceline plan --measure` writes: {error}") from error
    if problem := _problem(found):
        raise CalibrationError(f"{name}: {problem}")
    return found


def _problem(found: Calibration) -> str | None:
    """Returns what cannot be in a calibration, which people may have edited."""
    times = (*(value for value in vars(found.times).values()), *found.step_s)
    if any(value < 0 for value in times) or any(each.ready_s < 0 or each.nbytes < 0 for each in found.gradients):
        return "a time or a size is negative"
    if not found.step_s or found.alone_s <= 0:
        return "a step takes no time; step_s needs the seconds of at least one step"
    if not found.bucket_nbytes or min(found.bucket_nbytes) <= 0:
        return f"bucket_nbytes is {list(found.bucket_nbytes)}; it must hold positive numbers"
    return "forwards must be at least 1" if found.forwards < 1 else None


def read(path: str | os.PathLike[str]) -> Calibration:
    """Returns the calibration in a file.

    Raises:
        CalibrationError: there is none in it.
        OSError: the file cannot be read.
    """
    return decode(Path(path).read_bytes(), str(path))


def relative_spread(step_s: Sequence[float], in_a_row: int = 1) -> list[float]:
    """Returns the measured steps divided by their median, sorted.

    Args:
        step_s: the seconds of each step.
        in_a_row: how many steps ranks make before they wait for each other; then the values are of means of so many.
    """
    runs = max(1, len(step_s) // in_a_row)
    size = min(in_a_row, len(step_s))
    means = sorted(sum(step_s[at * size : (at + 1) * size]) / size for at in range(runs))
    middle = (means[(runs - 1) // 2] + means[runs // 2]) / 2
    return [mean / middle for mean in means]
