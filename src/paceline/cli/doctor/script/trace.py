"""Traces of a simulated job's ranks: the events that the rules examine, in order."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.cli.doctor import Confidence, Diagnostic, Severity
from paceline.cli.doctor.script.value import AbstractValue, Fact

EventKind = Literal[
    "init", "collective", "message", "wrap", "write", "directory", "download", "load", "load_state", "device",
    "set_device", "visible_devices", "sampler", "loader", "iterate", "leave", "backward", "change",
    "race", "spawn", "fork", "rpc", "query", "ratio", "new_group", "shared_outputs",
]  # fmt: skip
Phase = Literal["script", "worker", "uncalled"]
"""Whether an event occurs in the script itself, in a process that it starts, or in a function that it does not call."""


_OF_SEVERAL_PROCESSES = {
    "prepare", "prepare_model", "prepare_data_loader", "setup", "setup_dataloaders", "backward", "gather", "reduce",
    "gather_for_metrics", "wait_for_everyone", "barrier", "process_index", "local_process_index", "num_processes",
    "is_main_process", "is_local_main_process", "global_rank", "world_size", "split_between_processes",
}  # fmt: skip
"""The members of `Accelerator` and `Fabric` that scripts with several processes use."""


@dataclass(frozen=True)
class PathCondition:
    """A test on the path to an event, with its outcome."""

    node: ast.AST
    text: str
    outcome: bool
    facts: frozenset[Fact]
    is_known: bool

    @classmethod
    def of(cls, node: ast.AST, test: AbstractValue, outcome: bool) -> PathCondition:
        """Returns the condition that the test at a syntax node has this outcome."""
        return cls(node, test.text, outcome, test.facts, test.is_known)

    @property
    def depends_on_the_rank(self) -> bool:
        """Whether the test depends, or might depend, on the rank."""
        return not self.facts.isdisjoint({Fact.RANK, Fact.PERHAPS_RANK})

    @property
    def is_callback(self) -> bool:
        """Whether the test is a library call with a callback, which the library might call on only some of the
        ranks."""
        return isinstance(self.node, ast.Call) and not self.is_known


@dataclass(frozen=True, eq=False)
class TraceEvent:
    """A call or another action of one rank."""

    kind: EventKind
    name: str
    node: ast.AST
    conditions: tuple[PathCondition, ...]
    loops: tuple[ast.AST, ...]
    phase: Phase
    subject: AbstractValue | None = None  # the object of the action, such as the path of a file
    result: AbstractValue | None = None
    without_gradients: bool = False
    in_group: bool = False  # whether the call uses a group other than WORLD
    guarded: bool = False  # whether a lock or a similar context surrounds the action

    @property
    def line(self) -> int:
        """The line of the script."""
        return getattr(self.node, "lineno", 1)

    def guard(self) -> PathCondition | None:
        """Returns the innermost test that depends on the rank, or None."""
        return next((condition for condition in reversed(self.conditions) if condition.depends_on_the_rank), None)


@dataclass(eq=False)
class RankTrace:
    """The events of a rank. If `truncated`, the script was too large to be interpreted completely."""

    rank: int
    events: list[TraceEvent] = field(default_factory=list)
    objects: list[AbstractValue] = field(default_factory=list)  # results of calls that rules examine at the end
    truncated: bool = False

    def of(self, *kinds: EventKind) -> Iterator[TraceEvent]:
        """Yields the events of these kinds in order."""
        return (event for event in self.events if event.kind in kinds)


@dataclass(eq=False)
class ExecutionPath:
    """The current position of an interpreter, and the trace to which the interpreter adds events."""

    trace: RankTrace
    phase: Phase = "script"
    conditions: list[PathCondition] = field(default_factory=list)
    loops: list[tuple[ast.AST, int]] = field(default_factory=list)  # each with the number of conditions around it
    outer_loops: int = 0  # the number of loops around the current function
    without_gradients: int = 0  # the number of contexts that disable gradients
    without_averages: int = 0  # the number of contexts that skip gradient averaging
    evaluates: bool = False  # whether a model is in evaluation mode
    locks: int = 0  # the number of contexts that run the ranks one after another

    @property
    def is_in_loop(self) -> bool:
        """Whether the current position is inside a loop of the current function."""
        return len(self.loops) > self.outer_loops

    def record(
        self,
        kind: EventKind,
        name: str,
        node: ast.AST,
        subject: AbstractValue | None = None,
        result: AbstractValue | None = None,
        in_group: bool = False,
    ) -> None:
        """Adds an event to the trace."""
        event = TraceEvent(
            kind, name, node, tuple(self.conditions), tuple(loop for loop, _ in self.loops), self.phase, subject,
            result, self.without_gradients > 0 or self.evaluates, in_group, self.locks > 0,
        )  # fmt: skip
        self.trace.events.append(event)

    def record_leave(self, name: str, node: ast.AST, depth: int, test: PathCondition | None = None) -> None:
        """Adds an event for leaving the loop at `depth` early, with the conditions inside this loop."""
        loops = tuple(loop for loop, _ in self.loops[: depth + 1])
        conditions = (test,) if test else tuple(self.conditions[self.loops[depth][1] :])
        guarded = self.locks > 0
        self.trace.events.append(TraceEvent("leave", name, node, conditions, loops, self.phase, guarded=guarded))


@dataclass
class JobTrace:
    """The traces of all ranks.

    Args:
        tree: The syntax tree of the script.
        traces: The trace of each rank.
        local_size: The number of ranks on a machine.
        imported: The trace of a process that imports the script, as processes started with `spawn` do.
    """

    tree: ast.Module
    traces: Sequence[RankTrace]
    local_size: int
    imported: RankTrace
    phase: Phase = field(init=False)  # the phase in which the ranks train
    is_certain: bool = field(init=False)
    attributes: frozenset[str] = field(init=False)  # the names of all attributes in the script

    def __post_init__(self) -> None:
        self.attributes = frozenset(node.attr for node in ast.walk(self.tree) if isinstance(node, ast.Attribute))
        events = [event for trace in self.traces for event in trace.events]
        started = any(event.phase == "worker" for event in events)
        self.phase = "worker" if started else "script"
        ranks_with_init = {trace.rank for trace in self.traces if any(True for _ in self.of(trace, "init"))}
        everywhere = not ranks_with_init or len(ranks_with_init) == len(self.traces)
        truncated = any(trace.truncated for trace in self.traces)
        everywhere &= not any(event.kind == "init" and event.name == "alone" for event in events)
        everywhere &= any(event.kind in ("init", "query", "wrap") and event.phase == self.phase for event in events)
        everywhere &= self._uses_what_connects_it(events)
        self.is_certain = everywhere and not truncated and not any(event.kind == "rpc" for event in events)

    def _uses_what_connects_it(self, events: Sequence[TraceEvent]) -> bool:
        """Returns False if a script creates an `Accelerator` or a `Fabric` for one process, e.g. for an evaluation."""
        inits = {event.name for event in events if event.kind == "init"}
        return not inits or not inits <= {"Accelerator", "Fabric"} or bool(self.attributes & _OF_SEVERAL_PROCESSES)

    @property
    def is_distributed(self) -> bool:
        """Whether the script uses communication between ranks, rather than training in a single process."""
        kinds: tuple[EventKind, ...] = ("init", "collective", "message", "wrap", "query")
        return any(event.phase == self.phase for trace in self.traces for event in trace.of(*kinds))

    @property
    def initializes_itself(self) -> bool:
        """Whether the script itself, rather than an imported function, connects the ranks."""
        events = list(self.of(self.traces[0], "init"))
        return bool(events) and all(event.name != "imported" for event in events)

    @property
    def uses_accelerator(self) -> bool:
        """Whether a library (Accelerate or Fabric) prepares the data loaders and selects the devices."""
        return any(event.name in ("Accelerator", "Fabric") for trace in self.traces for event in trace.of("init"))

    def of(self, trace: RankTrace, *kinds: EventKind) -> Iterator[TraceEvent]:
        """Yields the events of a rank, except those in functions that the script does not call."""
        return (event for event in trace.of(*kinds) if event.phase == self.phase)

    def by_node(self, *kinds: EventKind) -> Iterator[list[list[TraceEvent]]]:
        """Yields, for every syntax node with events of these kinds, the events of each rank."""
        places: dict[ast.AST, list[list[TraceEvent]]] = {}
        for number, trace in enumerate(self.traces):
            for event in trace.of(*kinds):
                if event.phase in (self.phase, "uncalled"):
                    places.setdefault(event.node, [[] for _ in self.traces])[number].append(event)
        yield from sorted(places.values(), key=lambda ranks: first(ranks).line)

    def confidence(self, event: TraceEvent, *, unless: bool = False) -> Confidence:
        """Returns the confidence level of a finding. The level is low if `unless` is true."""
        certain = self.is_certain and self.is_distributed and event.phase == self.phase and not unless
        certain = certain and not self._excludes_init(event)
        return Confidence.HIGH if certain else Confidence.LOW

    def _excludes_init(self, event: TraceEvent) -> bool:
        """Returns True if a test with an unknown result leads either to an event or to a call that connects the
        ranks."""
        outcomes = {condition.node: condition.outcome for condition in event.conditions if not condition.is_known}
        inits = list(self.of(self.traces[0], "init"))
        return bool(inits) and all(
            any(
                outcomes.get(condition.node, condition.outcome) is not condition.outcome
                for condition in init.conditions
            )
            for init in inits
        )

    def counts(self, *kinds: EventKind, phase: Phase) -> list[Counter[str]]:
        """Returns, for every rank, the number of calls with each name, excluding calls in groups other than WORLD."""
        return [
            Counter(event.name for event in trace.of(*kinds) if event.phase == phase and not event.in_group)
            for trace in self.traces
        ]


def first(ranks: Sequence[Sequence[TraceEvent]]) -> TraceEvent:
    """Returns the first event of the lowest rank that has any events."""
    return next(events[0] for events in ranks if events)


def who(ranks: Sequence[int], world_size: int) -> str:
    """Returns a description of some of the ranks, such as `only rank 0`."""
    absent = [rank for rank in range(world_size) if rank not in ranks]
    if len(ranks) == 1:
        return f"only rank {ranks[0]}"
    if len(absent) == 1:
        return f"every rank but {absent[0]}"
    if list(ranks) == list(range(len(ranks))):
        return f"only the ranks below {len(ranks)}"
    return f"of {world_size} ranks, only {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def found(
    event: TraceEvent, about: str, seen: str, reason: str, fix: str, confidence: Confidence = Confidence.HIGH
) -> Diagnostic:
    """Returns a finding at the line of an event."""
    level = Severity.BAD if confidence is Confidence.HIGH else Severity.NOTE
    return Diagnostic(level, about, seen, reason, fix, event.line, confidence)
