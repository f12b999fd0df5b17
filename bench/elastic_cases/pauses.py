"""Computes figures from the records of a job's workers and the list of kills."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from elastic_cases.churn import Kill
from elastic_cases.timeline import Commit

_NS_A_MS, _NS_A_S = 1e6, 1e9
_SETTLING_NS = 300_000_000  # duration of the disturbance after a death
_FEW = 5  # a median requires more steps than this


@dataclass
class Figures:
    """The effects of the deaths in one or more jobs; times are in ms.

    Attributes:
        at_death: For each death and each other slot, the longest time between two steps before the replacement's first
            step, minus the median step.
        at_entry: For each death and each other slot, the time between the two steps around the replacement's first
            step, minus the median step.
        back: For each death, the time until a step was committed that had not been committed before.
        joined: For each death, the time until the replacement's first step.
        at_lesson: For each death and each other slot, the longest time between two steps from the end of the
            disturbance until the replacement's first step, minus the median step. Senders fork in this period.
        shares: For each death, the share of a core that the replacement used until its first step.
        meanwhile: For each death and each other slot, its median step from the end of the disturbance until the
            replacement's first step, divided by its median step in the whole job.
    """

    at_death: list[float] = field(default_factory=list)
    at_entry: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    joined: list[float] = field(default_factory=list)
    at_lesson: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    meanwhile: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # the median step of each job
    deaths: int = 0
    lost: int = 0  # steps that no worker committed
    redone: int = 0  # steps that a slot committed more than once
    given_up: int = 0
    restarted: int = 0  # workers that were restarted without having been killed

    def add(
        self,
        notes: Sequence[Commit],
        kills: Sequence[Kill],
        workers: int,
        steps: int,
        processor_s: Mapping[int, float] = {},
    ) -> None:
        """Adds a completed job; `processor_s` contains each process's processor time at its first step, in seconds."""
        commits = [note for note in notes if note.step > 0]
        of_slot = {slot: [each for each in commits if each.slot == slot] for slot in range(workers)}
        median_ns = statistics.median(
            later.at_ns - earlier.at_ns for each in of_slot.values() for earlier, later in pairwise(each)
        )
        self.steps.append(median_ns / _NS_A_MS)
        self.deaths += len(kills)
        self.lost += steps - len({each.step for each in commits})
        counts = Counter((each.slot, each.step) for each in commits)
        most = Counter[int]()
        for (_, step), count in counts.items():
            most[step] = max(most[step], count)
        self.redone += sum(count - 1 for count in most.values())
        self.given_up += len({note.step for note in notes if note.step < 0})
        self.restarted += len({note.pid for note in notes}) - workers - len(kills)
        for number, kill in enumerate(kills):
            until_ns = kills[number + 1].at_ns if number + 1 < len(kills) else commits[-1].at_ns + 1
            self._add_kill(of_slot, kill, until_ns, median_ns, processor_s)

    def _add_kill(
        self,
        of_slot: dict[int, list[Commit]],
        kill: Kill,
        until_ns: int,
        median_ns: float,
        processor_s: Mapping[int, float],
    ) -> None:
        everybody = [each for commits in of_slot.values() for each in commits]
        before = max(each.step for each in everybody if each.at_ns <= kill.at_ns)
        # Another death may occur while steps are being repeated, so the first new step may be later than `until_ns`.
        new = [each.at_ns for each in everybody if each.at_ns > kill.at_ns and each.step > before]
        first = next((each for each in of_slot[kill.slot] if each.at_ns > kill.at_ns and each.pid != kill.pid), None)
        if first is not None:  # None if the job completed before the replacement joined
            self.joined.append((first.at_ns - kill.at_ns) / _NS_A_MS)
            if first.pid in processor_s:
                self.shares.append(processor_s[first.pid] * _NS_A_S / (first.at_ns - kill.at_ns))
        if new:
            self.back.append((min(new) - kill.at_ns) / _NS_A_MS)
        for slot, commits in of_slot.items():
            if slot == kill.slot:
                continue
            gaps = [
                (later.at_ns - earlier.at_ns, later.step)
                for earlier, later in pairwise(commits)
                if kill.at_ns < later.at_ns < until_ns
            ]
            if first is not None:
                settled_ns = kill.at_ns + _SETTLING_NS
                pairs = [
                    pair for pair in pairwise(commits) if settled_ns < pair[0].at_ns and pair[1].at_ns < first.at_ns
                ]
                steps_ns = [later.at_ns - earlier.at_ns for earlier, later in pairs]
                if steps_ns:
                    self.at_lesson.append((max(steps_ns) - median_ns) / _NS_A_MS)
                if len(pairs) >= _FEW:
                    self.meanwhile.append(statistics.median(steps_ns) / median_ns)
            entry = next((at for at, (_, step) in enumerate(gaps) if first is not None and step == first.step), None)
            waited_ns = max(gap_ns for gap_ns, _ in gaps[: None if entry is None else max(entry, 1)])
            self.at_death.append((waited_ns - median_ns) / _NS_A_MS)
            if entry is not None:
                self.at_entry.append((gaps[entry][0] - median_ns) / _NS_A_MS)


def distribution(times_ms: Sequence[float], name: str = "") -> dict[str, object]:
    """Returns n, the median, the 99th percentile and the maximum, as columns of a table."""
    columns = [f"{name} {column}".strip() for column in ("n", "p50 ms", "p99 ms", "max ms")]
    if len(times_ms) < 2:
        only = times_ms[0] if times_ms else None
        return dict(zip(columns, (len(times_ms), only, only, only), strict=True))
    cuts = statistics.quantiles(times_ms, n=100, method="inclusive")
    return dict(zip(columns, (len(times_ms), cuts[49], cuts[98], max(times_ms)), strict=True))
