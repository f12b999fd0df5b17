"""What one look at a running or finished job finds: the input of the board. Times are seconds on the job's clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from paceline.operate.diagnosis import job_snapshot


class RankActivity(str, Enum):
    """What a rank is doing, as far as its recording says."""

    STARTING = "starting"
    RUNNING = "running"  # it records calls, and no steps
    TRAINING = "training"
    WAITING = "waiting"  # in a call, for other ranks
    LOADING = "loading"  # for its data
    SILENT = "silent"  # nothing was recorded for long
    ENDED = "ended"
    DEAD = "dead"


@dataclass(frozen=True)
class BucketTiming:
    """A bucket of gradients on its way: ready in backward, sent, and done on this rank."""

    ready_s: float
    sent_s: float
    done_s: float
    nbytes: int
    name: str = ""


@dataclass(frozen=True)
class RankStep:
    """One training step of one rank.

    Attributes:
        step: its number.
        begin_s: when it began; `end_s` when it ended.
        data_s: how long the rank waited for its data; likewise `forward_s`, `backward_s` and `optimizer_s` without the
            waits for other ranks within them.
        exposed_s: how long the rank did nothing but wait for communication.
        communication_s: how long any communication was under way.
        samples: how many samples the rank trained on, 0 if it did not say.
        phases: the phases as (name, begin, end), for the timeline.
        buckets: the buckets in the order in which they became ready.
        predicted_s: what the step would have lasted if its calls had taken what the engine predicted; None if it did
            not predict them.
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
        """The time from the step's begin to its end."""
        return self.end_s - self.begin_s

    @property
    def compute_s(self) -> float:
        """The rank's own part of the step: all but the wait for others."""
        return max(0.0, self.duration_s - self.exposed_s)


@dataclass(frozen=True)
class CallTally:
    """Calls of one kind that a rank has completed, and whose time the engine had predicted.

    Attributes:
        operation, dtype, count, algorithm: the kind; `count` are the elements of a call.
        calls: how many there were.
        took_s: how long they took together; `predicted_s` how long each should have taken.
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
    """What is known of a rank now, with its steps since the last sample.

    Attributes:
        rank: its rank; with `host` and `pid`, where it runs.
        state: what it is doing; `doing` says it in words, such as the call that it is in.
        heard_s: when it recorded something last.
        memory_nbytes: its resident memory.
        step: the number of the step that it is in, None before the first.
        steps: the steps that it has finished since the last sample, in order.
        values: what the program logged since the last sample: (step, name, value).
        calls: what it has completed since the last sample of what the engine predicts.
    """

    rank: int
    host: str = ""
    pid: int = 0
    state: RankActivity = RankActivity.STARTING
    doing: str = ""
    heard_s: float = 0.0
    memory_nbytes: int = 0
    step: int | None = None
    steps: tuple[RankStep, ...] = ()
    values: tuple[tuple[int, str, float], ...] = ()
    calls: tuple[CallTally, ...] = ()


@dataclass(frozen=True)
class LinkRate:
    """What a rank sends to another one over TCP, or to whomever through shared memory; then `peer` is -1.

    Attributes:
        nbytes_per_s: what it sent since the last sample.
        delivers_nbytes_per_s: the latest rate at which the kernel delivered data; 0 if it is not known.
        round_trip_s: the usual one, 0 if it is not known; `variation_s` how much it varies.
        retransmits: how many segments were sent again since the connections exist.
        recent: what they carried lately; None if it is not known.
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
    """Something that happened to the job: a start, a death, a view; `cost_s` is what it cost, if that is known."""

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
    """Why the job does not get on: one sentence, the ranks it names, and more lines for those who want them."""

    sentence: str
    ranks: tuple[int, ...] = ()
    details: tuple[str, ...] = ()
    at_s: float = 0.0


@dataclass(frozen=True)
class Stack:
    """The frames of a rank's threads as text, taken on request."""

    rank: int
    at_s: float
    text: str


@dataclass(frozen=True)
class JobInfo:
    """What is fixed, or changes seldom: the job's name, its command, how many ranks and steps it is to have.

    `total_steps` is None if the program does not say it. `outcome` is "" while the job runs.
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
    """One look at the whole job. `events`, `lines` and `stacks` are those since the last sample."""

    now_s: float
    facts: JobInfo
    ranks: tuple[RankSample, ...] = ()
    links: tuple[LinkRate, ...] = ()
    events: tuple[JobEvent, ...] = ()
    lines: tuple[Line, ...] = ()
    verdict: StallNotice | None = None
    stacks: tuple[Stack, ...] = field(default=())
