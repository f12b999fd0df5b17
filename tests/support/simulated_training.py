"""A simulated job: recordings of data-parallel training on any number of ranks, determined by the seed.

Each step is computed from the durations of each rank's own work. A bucket starts when it is ready on all ranks.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from paceline.operate.dashboard.job_sample import (
    BucketTiming,
    JobEvent,
    JobInfo,
    JobSample,
    Line,
    LinkRate,
    RankActivity,
    RankSample,
    RankStep,
    Stack,
    StallNotice,
)
from paceline.operate.diagnosis import job_snapshot

MIB = 1 << 20
BUCKETS = (
    (0.22, 4.0, "fc, head"),
    (0.45, 9.0, "layer4"),
    (0.70, 9.0, "layer3"),
    (0.88, 5.0, "layer2"),
    (1.0, 1.5, "layer1, stem"),
)
"""For each bucket: when it is ready (as a share of the backward pass), its size in MiB, and its layers."""


@dataclass
class Training:
    """A simulated training job.

    `slow` maps slow ranks to the factor by which they are slower; `hangs` is a rank and the step in which it stops.
    """

    ranks: int = 4
    seed: int = 7
    step_s: float = 0.1
    batch: int = 32
    total_steps: int | None = 5000
    slow: dict[int, float] = field(default_factory=dict)
    hangs: tuple[int, int] | None = None
    ranks_per_host: int = 4
    events: tuple[tuple[int, str, str, float | None], ...] = ()  # (step, kind, text, cost)
    first_step: int = 0
    restarts: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._now_s = 100.0
        self._started_s = self._now_s - self.first_step * self.step_s * 1.1
        self._step = self.first_step
        self._sent = 0
        self._new: dict[int, list[RankStep]] = {rank: [] for rank in range(self.ranks)}
        self._values: dict[int, list[tuple[int, str, float]]] = {rank: [] for rank in range(self.ranks)}
        self._lines: list[Line] = []
        self._events: list[JobEvent] = [JobEvent(self._started_s, "start", f"{self.ranks} ranks started", None)]
        self._hung_s: float | None = None

    def run(self, seconds: float) -> None:
        """Advances the virtual time."""
        end_s = self._now_s + seconds
        while self._now_s < end_s:
            if self.hangs is not None and self._step >= self.hangs[1]:
                self._hung_s = self._now_s if self._hung_s is None else self._hung_s
                self._now_s = end_s
            else:
                self._do_step()

    def _own(self, rank: int, share: float, spread: float) -> float:
        slow = self.slow.get(rank, 1.0)
        return self.step_s * share * slow * max(0.5, self._random.gauss(1.0, spread))

    def _do_step(self) -> None:
        step, begin_s = self._step, self._now_s
        data = [self._own(rank, 0.04, 0.3) for rank in range(self.ranks)]
        if step % 37 == 5:
            data[step % self.ranks] += self.step_s * 0.35
        forward = [self._own(rank, 0.26, 0.03) for rank in range(self.ranks)]
        backward = [self._own(rank, 0.50, 0.03) for rank in range(self.ranks)]
        optimizer = [self._own(rank, 0.07, 0.05) for rank in range(self.ranks)]
        at_backward = [begin_s + data[rank] + forward[rank] for rank in range(self.ranks)]
        free_s = 0.0
        times = []
        for share, mib, name in BUCKETS:
            ready = [at_backward[rank] + share * backward[rank] for rank in range(self.ranks)]
            start_s = max(max(ready), free_s)
            free_s = start_s + self.step_s * 0.012 * mib
            times.append((ready, start_s, free_s, int(mib * MIB), name))
        ends = [max(at_backward[rank] + backward[rank], free_s) + optimizer[rank] for rank in range(self.ranks)]
        for rank in range(self.ranks):
            end_of_backward = at_backward[rank] + backward[rank]
            waited_until = max(end_of_backward, free_s)
            buckets = tuple(
                BucketTiming(ready[rank], start, done, size, name) for ready, start, done, size, name in times
            )
            self._new[rank].append(
                RankStep(
                    step=step,
                    begin_s=begin_s,
                    end_s=max(ends),
                    data_s=data[rank],
                    forward_s=forward[rank],
                    backward_s=backward[rank],
                    exposed_s=(waited_until - end_of_backward) + (max(ends) - ends[rank]),
                    optimizer_s=optimizer[rank],
                    communication_s=sum(done - start for _, start, done, _, _ in times),
                    samples=self.batch,
                    phases=(
                        ("data", begin_s, begin_s + data[rank]),
                        ("forward", begin_s + data[rank], at_backward[rank]),
                        ("backward", at_backward[rank], end_of_backward),
                        ("exposed", end_of_backward, waited_until),
                        ("optimizer", waited_until, ends[rank]),
                    ),
                    buckets=buckets,
                )
            )
            loss = 2.3 * math.exp(-step / 900) + 0.25 + self._random.gauss(0, 0.04)
            self._values[rank].append((step, "loss", loss))
        rate = (
            3e-4
            * min(1.0, (step + 1) / 100)
            * 0.5
            * (1 + math.cos(math.pi * min(1.0, step / (self.total_steps or 5000))))
        )
        self._values[0].append((step, "lr", rate))
        if step % 10 == 0:
            self._lines.append(Line(max(ends), 0, 1, f"step {step:4d}  loss {loss:.4f}  lr {rate:.2e}"))
        if step % 53 == 17:
            self._lines.append(
                Line(max(ends), step % self.ranks, 2, "UserWarning: <b>The given NumPy array is not writable</b>")
            )
        for when, kind, text, cost in self.events:
            if when == step:
                self._events.append(JobEvent(max(ends), kind, text, cost))
        self._step += 1
        self._now_s = max(ends)

    def look(self) -> JobSample:
        """Returns the events since the last call."""
        hung = self.hangs[0] if self._hung_s is not None and self.hangs is not None else None
        quiet_s = self._now_s - self._hung_s if self._hung_s is not None else 0.0
        verdict = self._verdict(hung, quiet_s)
        ranks = []
        for rank in range(self.ranks):
            state, doing = RankActivity.TRAINING, ""
            if hung is not None:
                state = RankActivity.LOADING if rank == hung else RankActivity.WAITING
                doing = "DataLoader.__next__ (train.py:71)" if rank == hung else "all_reduce(float32, 4096), call 5,120"
            ranks.append(
                RankSample(
                    rank=rank,
                    host=f"node{rank // self.ranks_per_host}",
                    pid=4200 + rank,
                    state=state,
                    doing=doing,
                    last_record_s=self._now_s - (quiet_s if hung is not None else self._random.random() * 0.2),
                    memory_nbytes=int((1.6 + 0.05 * (rank % 5)) * 1024 * MIB),
                    step=self._step,
                    steps=tuple(self._new[rank]),
                    values=tuple(self._values[rank]),
                )
            )
            self._new[rank], self._values[rank] = [], []
        lines, self._lines = tuple(self._lines), []
        events, self._events = tuple(self._events), []
        stacks = () if verdict is None else self._stacks(hung)
        facts = JobInfo(
            run_id="digits-7f3a",
            command=f"paceline run --dash --nproc-per-node {min(self.ranks, self.ranks_per_host)} train.py",
            world_size=self.ranks,
            started_s=self._started_s,
            total_steps=self.total_steps,
            restarts=self.restarts,
            security="auth",
        )
        return JobSample(self._now_s, facts, tuple(ranks), self._links(), events, lines, verdict, stacks)

    def _links(self) -> tuple[LinkRate, ...]:
        hosts = -(-self.ranks // self.ranks_per_host)
        links = [LinkRate(rank, -1, "shared memory", 2.1e9 + 1e8 * (rank % 3)) for rank in range(min(self.ranks, 4))]
        for host in range(1, hosts):
            rank = host * self.ranks_per_host
            carried = job_snapshot.PeerTraffic(rank, 10 * MIB * (self._step + 1), 0.03 * (self._step + 1))
            trip_s = 0.00018 + 0.00002 * host
            links.append(
                LinkRate(rank - 1, rank, "TCP", 3.1e8 - 1e7 * host, 4.2e8, trip_s, trip_s / 4, host % 3, carried)
            )
        return tuple(links)

    def _verdict(self, hung: int | None, quiet_s: float) -> StallNotice | None:
        if hung is None or quiet_s < 10:
            return None
        others = f"ranks 0-{self.ranks - 1} but {hung}" if hung != self.ranks - 1 else f"ranks 0-{self.ranks - 2}"
        return StallNotice(
            f"step {self._step}: {others} wait in all_reduce(float32, 4096) call 5120 (train.py:88); rank {hung} has "
            f"not reached this call: it is in DataLoader.__next__ (train.py:71), for {quiet_s:.0f} s",
            (hung,),
            (f"The loader of rank {hung} has 2 workers; both sleep in read() of /data/shard-0007.tar.",),
            self._hung_s or 0.0,
        )

    def _stacks(self, hung: int | None) -> tuple[Stack, ...]:
        loader = '  File "train.py", line 71 in <module>\n  File "torch/utils/data/dataloader.py", line 733 in __next__'
        path = "paceline/comm/group/collectives/collectives.py"
        call = f'  File "train.py", line 88 in <module>\n  File "{path}", line 60 in all_reduce'
        return tuple(Stack(rank, self._now_s, loader if rank == hung else call) for rank in range(min(self.ranks, 8)))
