"""Sample of a running or finished job, the input for the aggregator. Times are in seconds on the job's clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from paceline.operate.diagnosis import job_snapshot


class RankActivity(str, Enum):
    """Activity of a rank, according to its recording."""

    STARTING = "starting"
    RUNNING = "running"  # the rank records calls but no steps
    TRAINING = "training"
    WAITING = "waiting"  # the rank is waiting in a call for other ranks
    LOADING = "loading"  # the rank is waiting for data
    SILENT = "silent"  # the rank has not recorded anything for a long time
    ENDED = "ended"
    DEAD = "dead"


@dataclass(frozen=True)
class BucketTiming:
    """Times at which a gradient bucket was ready, sent, and averaged on this rank."""

    ready_s: float
    sent_s: float
    done_s: float
    nbytes: int
    name: str = ""


@dataclass(frozen=True)
class RankStep:
    """One training step on one rank.

    Attributes:
        step: the number of the step.
        begin_s, end_s: the times at which the step began and ended.
        data_s, forward_s, backward_s, optimizer_s: the durations of the step's phases, excluding waits for other ranks.
        exposed_s: the time that the rank spent doing nothing but waiting for communication.
        communication_s: the time during which any communication was in progress.
        samples: the number of samples that the rank trained on; 0 if the program does not log this number.
        phases: the phases as (name, begin, end), for the timeline.
        buckets: the buckets in the order in which they became ready.
        predicted_s: the duration that the step would have had if its calls had taken the predicted time; None without
            predictions.
    """

    step: int
    begin_s: float
    end_s: float
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    exposed_s: float = 0.0
    optimizer_s: float = 0.0
    communication_s: float = 0.0
    samples: float = 0.0
    phases: tuple[tuple[str, float, float], ...] = ()
    buckets: tuple[BucketTiming, ...] = ()
    predicted_s: float | None = None

    @property
    def duration_s(self) -> float:
        """The duration of the step."""
        return self.end_s - self.begin_s

    @property
    def compute_s(self) -> float:
        """The rank's own time in the step, excluding the wait for communication."""
        return max(0.0, self.duration_s - self.exposed_s)


@dataclass(frozen=True)
class CallStatistics:
    """Statistics on completed calls of one kind for which the engine had predicted a duration.

    Attributes:
        operation, dtype, count, algorithm: the kind of call; `count` is the number of elements per call.
        calls: the number of calls.
        took_s: the total duration of the calls.
        predicted_s: the predicted duration of one call.
    """

    operation: str
    dtype: str
    count: int
    algorithm: str
    calls: int
    took_s: float
    predicted_s: float


@dataclass(frozen=True)
class RankSample:
    """The state of a rank, with its steps since the previous sample.

    Attributes:
        rank, host, pid: the rank, its host and its process id.
        state: the activity of the rank.
        doing: a description of the activity, such as the rank's current call.
        last_record_s: the time of the rank's latest record.
        memory_nbytes: the resident memory of the process.
        step: the number of the current step; None before the first step.
        steps: the steps completed since the previous sample, in order.
        values: the values that the program has logged since the previous sample, as (step, name, value).
        calls: the calls with predictions that were completed since the previous sample.
        pending: the rank's groups and latest calls if a rank on its host has been waiting for a long time, otherwise
            None.
    """

    rank: int
    host: str = ""
    pid: int = 0
    state: RankActivity = RankActivity.STARTING
    doing: str = ""
    last_record_s: float = 0.0
    memory_nbytes: int = 0
    step: int | None = None
    steps: tuple[RankStep, ...] = ()
    values: tuple[tuple[int, str, float], ...] = ()
    calls: tuple[CallStatistics, ...] = ()
    pending: job_snapshot.RankState | None = None


@dataclass(frozen=True)
class LinkRate:
    """The rate at which a rank sends to another rank over TCP, or through shared memory if the peer is -1.

    Attributes:
        nbytes_per_s: the rate since the previous sample.
        delivers_nbytes_per_s: the latest delivery rate reported by the kernel; 0 if unknown.
        round_trip_s, variation_s: the smoothed round-trip time and its variation; 0 if unknown.
        retransmits: the total number of retransmitted segments.
        recent: the recent traffic, or None if unknown.
    """

    rank: int
    peer: int
    kind: str
    nbytes_per_s: float
    delivers_nbytes_per_s: float = 0.0
    round_trip_s: float = 0.0
    variation_s: float = 0.0
    retransmits: int = 0
    recent: job_snapshot.PeerTraffic | None = None


@dataclass(frozen=True)
class JobEvent:
    """An event in the job, such as the exit of a worker or a new view. `cost_s` is the time lost, if known."""

    at_s: float
    kind: str
    text: str
    cost_s: float | None = None


@dataclass(frozen=True)
class Line:
    """A line of a worker's output; `stream` is 1 for stdout and 2 for stderr."""

    at_s: float
    rank: int
    stream: int
    text: str


@dataclass(frozen=True)
class StallNotice:
    """Diagnosis of a job that is making no progress or has failed: a sentence, the blamed ranks, and additional
    lines."""

    sentence: str
    ranks: tuple[int, ...] = ()
    details: tuple[str, ...] = ()
    at_s: float = 0.0
    is_failure: bool = False


@dataclass(frozen=True)
class Stack:
    """A rank's stack as text, captured on request."""

    rank: int
    at_s: float
    text: str


@dataclass(frozen=True)
class JobInfo:
    """Properties of a job that rarely change.

    `total_steps` is None if the program does not log it. `outcome` is "" while the job runs.
    """

    run_id: str
    command: str = ""
    world_size: int = 0
    started_s: float = 0.0
    total_steps: int | None = None
    restarts: int = 0
    security: str = ""
    outcome: str = ""
    is_elastic: bool = False


@dataclass(frozen=True)
class JobSample:
    """A sample of the whole job. `events`, `lines` and `stacks` cover the time since the previous sample."""

    now_s: float
    facts: JobInfo
    ranks: tuple[RankSample, ...] = ()
    links: tuple[LinkRate, ...] = ()
    events: tuple[JobEvent, ...] = ()
    lines: tuple[Line, ...] = ()
    verdict: StallNotice | None = None
    stacks: tuple[Stack, ...] = field(default=())
