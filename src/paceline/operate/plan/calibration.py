"""What a calibration holds: the times, bytes and links of one script, in a small file that people can edit.

The file is JSON. Each name ends with its unit; `docs/plan.md` describes every entry.

Networks as `paceline plan` is told them: so many hosts of so many ranks, divided evenly among regions.
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
    """A file is no calibration, or one of another version, or holds what cannot be."""


@dataclass(frozen=True)
class MeasuredGradient:
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
class MeasuredTimes:
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
class MeasuredMemory:
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
    link: NetworkLink


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

    within_host: NetworkLink
    node: NetworkLink | None
    region: NetworkLink | None
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


def network_of(links: Links, nodes: int, per_node: int, regions: int = 1) -> Network:
    """Returns the network of `nodes` hosts with `per_node` ranks each.

    Args:
        links: the links that were measured or given.
        nodes: the number of hosts.
        per_node: the number of ranks on each.
        regions: into how many groups the hosts are divided, each of which shares one link to the others.

    Raises:
        CalibrationError: a link that the network needs is not known.
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
        members = [range(each * nodes // regions, (each + 1) * nodes // regions) for each in range(regions)]
        groups = tuple(UplinkGroup(f"region {at}", tuple(each), links.region) for at, each in enumerate(members))
    return Network(
        hosts=hosts,
        within_host=links.within_host,
        node=links.node or links.within_host,
        groups=groups,
        gamma_s_per_byte=links.reduction_s_per_byte,
    )


def with_rate(links: Links, times: float) -> Links:
    """Returns the links with those of hosts and regions `times` as fast."""
    faster = {
        name: replace(link, bytes_per_s=link.bytes_per_s * times)
        for name, link in (("node", links.node), ("region", links.region))
        if link is not None
    }
    return Links(
        links.within_host,
        faster.get("node"),
        faster.get("region"),
        links.reduction_s_per_byte,
        links.host_calls,
        links.pairs,
    )
