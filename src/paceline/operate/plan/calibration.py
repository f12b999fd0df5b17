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
    """Raised for a file that is not a calibration, has an unsupported version, or contains invalid values."""


@dataclass(frozen=True)
class MeasuredGradient:
    """A parameter's gradient.

    Attributes:
        name: the name of the parameter.
        nbytes: the size of the gradient in bytes.
        dtype: the data type, such as "float32"; a bucket contains gradients of only one type.
        ready_s: the time from the start of the backward pass until the gradient is complete, in seconds.
    """

    name: str
    nbytes: int
    dtype: str
    ready_s: float


@dataclass(frozen=True)
class MeasuredTimes:
    """The median durations of a step's parts, in seconds, on a rank that runs alone.

    Attributes:
        data_s: the time that the rank spends waiting for the loader.
        forward_s: the duration of one forward pass.
        backward_s: the duration of one backward pass, until the last gradient is ready.
        optimizer_s: the duration of the optimizer step.
        rest_s: the duration of everything else, such as the loss, logging, and clearing gradients.
    """

    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    rest_s: float


@dataclass(frozen=True)
class MeasuredMemory:
    """Memory use of a rank, in bytes.

    Attributes:
        parameter_nbytes: the size of the parameters.
        gradient_nbytes: the size of the gradients.
        optimizer_nbytes: the size of the optimizer state.
        other_nbytes: the rest of the peak resident memory, used by the interpreter, libraries, activations and data.
    """

    parameter_nbytes: int
    gradient_nbytes: int
    optimizer_nbytes: int
    other_nbytes: int


@dataclass(frozen=True)
class HostCall:
    """The measured duration of an all-reduce of `nbytes` bytes among `ranks` ranks on one host."""

    ranks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class PairLink:
    """The link between two hosts. Hosts are numbered in the order of their ranks.

    The rate was measured on a single connection and includes the effect of losses; `loss` is the fraction of segments
    that were retransmitted.
    """

    first: int
    second: int
    link: NetworkLink


@dataclass(frozen=True)
class Links:
    """Link properties, measured or given by the user.

    Attributes:
        within_host: the link between two ranks on one host.
        node: the link between a host and the network; None if unknown.
        region: the link between a group of hosts, such as a rack or a region, and the other groups; None without
            groups.
        reduction_s_per_byte: the time for a reduction to process one byte, in seconds.
        host_calls: the measured all-reduces on one host, for which no schedule can be simulated.
        pairs: the links between the measured hosts; empty if there was only one host.
    """

    within_host: NetworkLink
    node: NetworkLink | None
    region: NetworkLink | None
    reduction_s_per_byte: float
    host_calls: tuple[HostCall, ...] = ()
    pairs: tuple[PairLink, ...] = ()


@dataclass(frozen=True)
class Origin:
    """The origin of a calibration: the command, and the machine on which it ran.

    Attributes:
        command: the script and its arguments.
        date, host, versions: the date, the machine and the versions of libraries, for display only.
        cores, threads: the number of usable cores, and the number of a rank's threads.
        together: the number of ranks that ran at the same time.
        contention: the fraction of the cores' time that other processes used in competition with the ranks.
    """

    command: tuple[str, ...]
    date: str
    host: str
    cores: int
    threads: int
    together: int
    versions: dict[str, str]
    contention: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """All measurements of a script.

    Attributes:
        version: the version of the file format.
        origin: the origin of the measurements.
        times: the median durations of a step's parts.
        step_s: the duration of each measured step, in seconds. The spread of these durations determines how long ranks
            wait for each other.
        samples: the number of samples that a rank processes per step; None if unknown.
        forwards: the number of forward passes per step; greater than 1 with gradient accumulation.
        gradients: the gradients, in the order in which the module registers parameters.
        bucket_nbytes: the maximum sizes of the first bucket, the second, and so on; the last value applies to all
            further buckets.
        overlaps: whether gradients are averaged during the backward pass.
        buffer_nbytes: the total size of the buffers that rank 0 broadcasts before each forward pass.
        memory: the memory use of a rank.
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
        """The duration of a step on a rank that runs alone, in seconds."""
        times = self.times
        return times.data_s + self.forwards * (times.forward_s + times.backward_s) + times.optimizer_s + times.rest_s

    @property
    def gradient_nbytes(self) -> int:
        """The total size of the gradients, in bytes."""
        return sum(gradient.nbytes for gradient in self.gradients)


def encode(calibration: Calibration) -> bytes:
    """Serializes the calibration for its file."""
    return msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n"


def decode(content: bytes, name: str = "the calibration") -> Calibration:
    """Parses the content of a calibration file.

    Raises:
        CalibrationError: the content is not a valid calibration; the message contains the invalid entry.
    """
    try:
        version = msgspec.json.decode(content, type=dict[str, object]).get("version")
        if version != VERSION:
            raise CalibrationError(
                f"{name} has version {version}, but this version of Paceline reads {VERSION}; measure again with "
                "`paceline plan --measure -- SCRIPT`"
            )
        found = msgspec.json.decode(content, type=Calibration)
    except msgspec.MsgspecError as error:
        raise CalibrationError(f"{name} is not a calibration written by `paceline plan --measure`: {error}") from error
    if problem := _problem(found):
        raise CalibrationError(f"{name}: {problem}")
    return found


def _problem(found: Calibration) -> str | None:
    """Returns a message about an invalid value, or None. Users may edit the file, so values are checked."""
    sizes = (value for gradient in found.gradients for value in (gradient.ready_s, gradient.nbytes))
    if min(*vars(found.times).values(), *found.step_s, *sizes) < 0:
        return "a time or a size is negative"
    if not found.step_s or found.alone_s <= 0:
        return "step_s is empty or zero; it must contain the duration of at least one step in seconds"
    if not found.bucket_nbytes or min(found.bucket_nbytes) <= 0:
        return f"bucket_nbytes is {list(found.bucket_nbytes)}; it must hold positive numbers"
    return "forwards must be at least 1" if found.forwards < 1 else None


def read(path: str | os.PathLike[str]) -> Calibration:
    """Reads a calibration file.

    Raises:
        CalibrationError: the file is not a valid calibration.
        OSError: the file cannot be read.
    """
    return decode(Path(path).read_bytes(), str(path))


def relative_spread(step_s: Sequence[float], in_a_row: int = 1) -> list[float]:
    """Returns the step durations divided by their median, in ascending order.

    Args:
        step_s: the duration of each step, in seconds.
        in_a_row: the number of steps that ranks run between synchronizations; each result is the mean over that many
            steps.
    """
    runs = max(1, len(step_s) // in_a_row)
    size = min(in_a_row, len(step_s))
    means = sorted(sum(step_s[run * size : (run + 1) * size]) / size for run in range(runs))
    middle = (means[(runs - 1) // 2] + means[runs // 2]) / 2
    return [mean / middle for mean in means]


def network_of(links: Links, nodes: int, per_node: int, regions: int = 1) -> Network:
    """Returns the network of `nodes` hosts with `per_node` ranks each.

    Args:
        links: the link properties, measured or given by the user.
        nodes: the number of hosts.
        per_node: the number of ranks on each host.
        regions: the number of equally sized groups of hosts; the hosts of a group share one link to the other groups.

    Raises:
        CalibrationError: the properties of a required link are unknown.
        ValueError: a number is not positive, or there are more regions than hosts.
    """
    if nodes < 1 or per_node < 1 or not 1 <= regions <= nodes:
        raise ValueError(
            f"{nodes} nodes with {per_node} ranks each in {regions} regions are not a valid network; every number must "
            "be at least 1, and each region needs a node"
        )
    if nodes > 1 and links.node is None:
        raise CalibrationError(
            "the calibration contains no link between hosts; specify one, such as --links node=25gbit,0.05ms, or "
            "measure it with `paceline plan --measure --nnodes 2` on two machines"
        )
    if regions > 1 and links.region is None:
        raise CalibrationError("the link between regions is not known; specify it, such as --links region=1gbit,20ms")
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
    """Returns the links with the rates of host and region links multiplied by `times`."""

    def scaled(link: NetworkLink | None) -> NetworkLink | None:
        return None if link is None else replace(link, bytes_per_s=link.bytes_per_s * times)

    return replace(links, node=scaled(links.node), region=scaled(links.region))
