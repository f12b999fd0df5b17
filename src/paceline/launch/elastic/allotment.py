"""The machines of an elastic job: who is connected, and which slots and which store each of them has."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.elastic.knowledge import Report
from paceline.launch.nodes.messages import Begin, Join


@dataclass
class Machine:
    """A node: what it said when it came, its number, and its first slot once it has begun."""

    join: Join
    number: int
    slots: int
    first_slot: int | None = None

    @property
    def store(self) -> str:
        """Where its launcher serves a store to the workers of other machines."""
        host = self.join.address
        return f"tcp:[{host}]:{self.join.port}" if ":" in host else f"tcp:{host}:{self.join.port}"


@dataclass
class Machines:
    """The machines, of which each has a number that no other has.

    Attributes:
        is_lone: there is one machine, and there will be no other.
        here: those that are connected, by node.
        away: those that are lost, and keep their slots.
        count: how many numbers were given.
        home: the machine of the launcher that coordinates, once the machines have gathered.
    """

    is_lone: bool
    here: dict[str, Machine] = field(default_factory=dict)
    away: list[Machine] = field(default_factory=list)
    count: int = 0
    home: int = -1

    def add(self, node: str, join: Join) -> Machine:
        """Adds a machine that comes for the first time."""
        self.here[node] = found = Machine(join, self.count, join.workers)
        self.count += 1
        return found

    def returns(self, node: str, join: Join, report: Report) -> Machine:
        """Adds a machine that takes part already, and is connected once more."""
        for before in [each for each, machine in self.here.items() if machine.number == report.number]:
            del self.here[before]
        self.away = [each for each in self.away if each.number != report.number]
        self.here[node] = found = Machine(join, report.number, report.slots, report.first_slot)
        return found

    def name(self, node: str) -> str:
        """Returns the machine's name for the coordinator: its number."""
        return str(self.here[node].number)

    def nodes(self) -> dict[str, str]:
        """Returns the nodes of the machines that are connected, by name."""
        return {str(machine.number): node for node, machine in self.here.items()}

    def listens(self, number: int) -> str:
        """Returns where the launcher of a machine can be reached by others; empty if that is not known."""
        found = (each.join.listens for each in [*self.here.values(), *self.away] if each.number == number)
        return next(found, "")

    def store(self) -> str | None:
        """Returns where the workers meet; None while the machine that serves the store is not here."""
        found = (each for each in self.here.values() if self.home in (-1, each.number))
        serving = next((each for each in found if each.join.serves or each.number == self.home), None)
        return None if serving is None else self.served_by(serving)

    def served_by(self, machine: Machine) -> str:
        """Returns where that machine serves a store to all workers; a lone machine needs no such place."""
        return "" if self.is_lone else machine.store

    def begin(self, node: str, run_id: str) -> Begin:
        """Gives a machine the first slots that no other has; those that are away keep theirs."""
        machine = self.here[node]
        taken = sorted(
            (each.first_slot, each.first_slot + each.join.workers)
            for each in [*self.here.values(), *self.away]
            if each.first_slot is not None
        )
        first = 0
        for begin, end in taken:
            if first + machine.join.workers <= begin:
                break
            first = max(first, end)
        machine.first_slot = first
        ends = [end for _, end in taken]
        slots = max(sum(each.join.workers for each in self.here.values()), first + machine.join.workers, *ends, 0)
        return Begin(machine.number, first, slots, run_id, self.store() or "")
