"""Calibration: the times, sizes and links of one script, in a small JSON file that users can edit.

Each name ends with its unit; `docs/plan.md` describes every entry. `network_of` builds networks from the links.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from paceline.comm.schedule.network import Network, NetworkLink, UplinkGroup

VERSION = 1


class CalibrationError(ValueError):
    """A file is not a calibration, has another version, or has invalid values."""


@dataclass(frozen=True)
class MeasuredGradient:
    """A parameter's gradient.

    Attributes:
        name: the name of the parameter.
        nbytes: the size of the gradient in bytes.
        dtype: the type, such as "float32"; gradients of different types are never in one bucket.
        ready_s: the seconds from the beginning of backward until the gradient is complete.
    """

    name: str
    nbytes: int
    dtype: str
    ready_s: float


@dataclass(frozen=True)
class MeasuredTimes:
    """The median durations of a step's parts, in seconds, on one rank that waits for no other.

    Attributes:
        data_s: the time that the rank waits for the loader.
        forward_s: the duration of one forward.
        backward_s: the duration of one backward, until the last gradient is ready.
        optimizer_s: the duration of the optimizer's step.
        rest_s: the duration of everything else, such as the loss, logging, and clearing gradients.
    """

    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    rest_s: float


@dataclass(frozen=True)
class MeasuredMemory:
    """The memory of a rank, in bytes.

    Attributes:
        parameter_nbytes: the parameters.
        gradient_nbytes: the gradients.
        optimizer_nbytes: the optimizer's state.
        other_nbytes: the rest of the peak resident memory: the interpreter, libraries, activations and data.
    """

    parameter_nbytes: int
    gradient_nbytes: int
    optimizer_nbytes: int
    other_nbytes: int


@dataclass(frozen=True)
class HostCall:
    """The duration of an all-reduce of `nbytes` among `ranks` ranks of one host."""

    ranks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class PairLink:
    """The link between two hosts, which are numbered in the order of their ranks.

    Its rate is that of one connection, including losses; `loss` is the share of segments that were sent again.
    """

    first: int
    second: int
    link: NetworkLink


@dataclass(frozen=True)
class Links:
    """The links that were measured or given.

    Attributes:
        within_host: the link between two ranks of a host.
        node: the link between a host and the network; None if unknown.
        region: the link between a group of hosts, such as a rack or a region, and the others; None without groups.
        reduction_s_per_byte: the seconds that it takes to add a byte to a sum.
        host_calls: the measured all-reduces on one host, which do not follow a schedule.
        pairs: the links between the measured hosts, if there were several.
    """

    within_host: NetworkLink
    node: NetworkLink | None
    region: NetworkLink | None
    reduction_s_per_byte: float
    host_calls: tuple[HostCall, ...] = ()
    pairs: tuple[PairLink, ...] = ()


@dataclass(frozen=True)
class Origin:
    """The origin of a calibration, as information for users."""

    command: tuple[str, ...]
    date: str
    host: str
    cores: int
    threads: int
    together: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Calibration:
    """The measurements of a script.

    Attributes:
        version: the version of the file's format.
        origin: the origin of the measurements.
        times: the median durations of a step's parts.
        step_s: the seconds of each measured step, whose spread determines how long ranks wait for each other.
        samples: the number of samples of a rank in a step; None if unknown.
        forwards: the number of forwards in a step, more than one with gradient accumulation.
        gradients: the gradients, in the order in which the module registers parameters.
        bucket_nbytes: the largest size of the first bucket, the second, and so on; the last is that of all others.
        overlaps: whether gradients are averaged during backward.
        buffer_nbytes: the size of the buffers that rank 0 sends to all ranks before each forward.
        memory: the memory of a rank.
        links: the links of the job.
    """

    version: int
    origin: Origin
    times: MeasuredTimes
    step_s: tuple[float, ...]
    samples: float | None
    forwards: int
    gradients: tuple[MeasuredGradient, ...]
    bucket_nbytes: tuple[int, ...]
    overlaps: bool
    buffer_nbytes: int
    memory: MeasuredMemory
    links: Links

    @property
    def alone_s(self) -> float:
        """The seconds of a step on one rank that waits for no other."""
        times = self.times
        return times.data_s + self.forwards * (times.forward_s + times.backward_s) + times.optimizer_s + times.rest_s

    @property
    def gradient_nbytes(self) -> int:
        """The bytes of all gradients."""
        return sum(gradient.nbytes for gradient in self.gradients)


def encode(calibration: Calibration) -> bytes:
    """Returns the content of the calibration file."""
    return msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n"


def decode(content: bytes, name: str = "the calibration") -> Calibration:
    """Parses the calibration in a file's content.

    Raises:
        CalibrationError: the content is not a valid calibration; the message names the wrong entry.
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
    """Returns a message about an invalid value, since users may edit the file, or None."""
    sizes = (value for gradient in found.gradients for value in (gradient.ready_s, gradient.nbytes))
    if min(*vars(found.times).values(), *found.step_s, *sizes) < 0:
        return "a time or a size is negative"
    if not found.step_s or found.alone_s <= 0:
        return "a step takes no time; step_s needs the seconds of at least one step"
    if not found.bucket_nbytes or min(found.bucket_nbytes) <= 0:
        return f"bucket_nbytes is {list(found.bucket_nbytes)}; it must hold positive numbers"
    return "forwards must be at least 1" if found.forwards < 1 else None


def read(path: str | os.PathLike[str]) -> Calibration:
    """Reads the calibration in a file.

    Raises:
        CalibrationError: the file is not a valid calibration.
        OSError: the file cannot be read.
    """
    return decode(Path(path).read_bytes(), str(path))


def relative_spread(step_s: Sequence[float], in_a_row: int = 1) -> list[float]:
    """Returns the measured steps divided by their median, sorted.

    Args:
        step_s: the seconds of each step.
        in_a_row: the number of steps that ranks make before they wait for each other; each value is a mean over that
            many steps.
    """
    runs = max(1, len(step_s) // in_a_row)
    size = min(in_a_row, len(step_s))
    means = sorted(sum(step_s[run * size : (run + 1) * size]) / size for run in range(runs))
    middle = (means[(runs - 1) // 2] + means[runs // 2]) / 2
    return [mean / middle for mean in means]


def network_of(links: Links, nodes: int, per_node: int, regions: int = 1) -> Network:
    """Returns the network of `nodes` hosts with `per_node` ranks each.

    Args:
        links: the links that were measured or given.
        nodes: the number of hosts.
        per_node: the number of ranks on each host.
        regions: the number of equal groups of hosts, each of which shares one link to the others.

    Raises:
        CalibrationError: a link that the network needs is unknown.
        ValueError: a number is not positive, or there are more regions than hosts.
    """
    if nodes < 1 or per_node < 1 or not 1 <= regions <= nodes:
        raise ValueError(
            f"{nodes} nodes with {per_node} ranks each in {regions} regions are no network; every number must be at "
            "least 1, and each region needs a node"
        )
    if nodes > 1 and links.node is None:
        raise CalibrationError(
            "the calibration knows no link between hosts; give one, such as --links node=25gbit,0.05ms, or measure it "
            "with `paceline plan --measure --nnodes 2` on two machines"
        )
    if regions > 1 and links.region is None:
        raise CalibrationError("the link between regions is not known; give it, such as --links region=1gbit,20ms")
    hosts = tuple(tuple(range(host * per_node, (host + 1) * per_node)) for host in range(nodes))
    groups: tuple[UplinkGroup, ...] = ()
    if regions > 1 and links.region is not None:
        members = [range(number * nodes // regions, (number + 1) * nodes // regions) for number in range(regions)]
        groups = tuple(UplinkGroup(f"region {number}", tuple(m), links.region) for number, m in enumerate(members))
    return Network(
        hosts=hosts,
        within_host=links.within_host,
        node=links.node or links.within_host,
        groups=groups,
        gamma_s_per_byte=links.reduction_s_per_byte,
    )


def with_rate(links: Links, times: float) -> Links:
    """Returns the links with the rates of hosts and regions multiplied by `times`."""

    def scaled(link: NetworkLink | None) -> NetworkLink | None:
        return None if link is None else replace(link, bytes_per_s=link.bytes_per_s * times)

    return replace(links, node=scaled(links.node), region=scaled(links.region))
