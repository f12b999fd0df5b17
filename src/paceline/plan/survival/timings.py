"""How long the parts of a death, a join and a restart take, and how often machines fail."""

from __future__ import annotations

from dataclasses import dataclass

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


@dataclass(frozen=True)
class Timings:
    """Seconds of one job's events. The defaults are medians of `bench/elastic.py` and `bench/death.py` on two cores.

    Attributes:
        step_s: a step of the whole job, while nothing happens.
        noticing_s: from the death of a process until the others know.
        silence_s: from the loss of a machine, which closes no connection, until it is given up.
        message_s: from a worker to the coordinator, or back.
        forming_s: a member's own work for a new view: it leaves the old group and makes ready for the next one.
        meeting_s: until the members of a new view are connected, after that; a single member has nobody to meet.
        starting_s: until a worker that replaces another on its machine is ready; a spare interpreter stands by.
        repair_s: until another machine takes the place of a lost one.
        copying_s: until a newcomer has the state.
        slowness: of the others' steps while a newcomer copies; 1 if they do not notice.
        replaying: how long a newcomer takes for a step that the others have made meanwhile, as a share of a step.
        saving_s: by how much a checkpoint delays the training.
        restarting_s: until all workers run again and have loaded a checkpoint.
    """

    step_s: float
    noticing_s: float = 0.009
    silence_s: float = 2.0
    message_s: float = 0.001
    forming_s: float = 0.03
    meeting_s: float = 0.05
    starting_s: float = 0.3
    repair_s: float = 600.0
    copying_s: float = 1.0
    slowness: float = 1.3
    replaying: float = 0.3
    saving_s: float = 1.0
    restarting_s: float = 60.0

    def problem(self) -> str | None:
        """Returns what cannot be among the times, None if all can."""
        if self.step_s <= 0:
            return f"step_s is {self.step_s}; a step takes time"
        negative = next((name for name, value in vars(self).items() if value < 0), None)
        if negative is not None:
            return f"{negative} is {getattr(self, negative)}; no time is negative"
        if self.slowness < 1 or self.replaying >= 1:
            return f"slowness is {self.slowness} and replaying {self.replaying}; they are at least 1 and less than 1"
        return None


@dataclass(frozen=True)
class Failures:
    """Mean times between failures, in seconds; 0 for never. Failures are independent of each other (Poisson).

    Attributes:
        worker_s: of each worker's process, which its machine replaces.
        machine_s: of each machine, with all its workers.
        job_s: of everything at once: a power cut, or a reservation that ends. Only checkpoints survive it.
    """

    worker_s: float = 0.0
    machine_s: float = 30 * DAY_S
    job_s: float = 0.0

    def rate(self, machines: int, per_machine: int) -> float:
        """Returns the failures a second of so many machines, without those of everything at once."""
        rate = machines / self.machine_s if self.machine_s else 0.0
        return rate + (machines * per_machine / self.worker_s if self.worker_s else 0.0)
