"""The state of a simulated rank while its script is interpreted: its variables, its path, and its processes.

The state branches where the result of a test is unknown. Both branches then start with the same variables, and the
variables that they assign are merged afterward, as in symbolic execution.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from paceline.cli.doctor.script.trace import ExecutionPath, PathCondition, Phase, RankTrace
from paceline.cli.doctor.script.value import AbstractValue, Fact, SimulatedRank, either, known

Flow = set[str]
"""The possible ways to leave a block: `next`, `break`, `continue`, `return`, or `stop` (an exception or an exit)."""

Scope = dict[str, AbstractValue]
Assignments = dict[tuple[int, str], tuple[Scope, AbstractValue]]
"""The last value that a branch assigns to each variable in each scope."""

_MISSING = AbstractValue("missing")


class AssignmentLog:
    """Records assignments to variables and attributes, so that each branch of a test starts with the same values.

    `begin` is called before a branch and `undo` after it. `merge` then assigns to each variable the alternatives from
    all branches.
    """

    def __init__(self) -> None:
        self._branches: list[list[tuple[Scope, str, AbstractValue]]] = []

    def store(self, scope: Scope, name: str, value: AbstractValue) -> None:
        """Assigns a value to a variable."""
        if self._branches:
            self._branches[-1].append((scope, name, scope.get(name, _MISSING)))
        scope[name] = value

    def begin(self) -> None:
        """Begins a branch. Branches can be nested."""
        self._branches.append([])

    def undo(self) -> Assignments:
        """Undoes the assignments of the current branch, and returns them."""
        branch = self._branches.pop()
        assigned = {(id(scope), name): (scope, scope.get(name, _MISSING)) for scope, name, _ in branch}
        for scope, name, before in reversed(branch):
            if before is _MISSING:
                scope.pop(name, None)
            else:
                scope[name] = before
        return assigned

    def merge(self, branches: Sequence[Assignments], facts: frozenset[Fact] = frozenset()) -> None:
        """Assigns to each variable the alternatives from all branches.

        If `facts` states that the test differs between the ranks, numbers assigned in only one branch differ as well.
        """
        for identity in {choice: None for branch in branches for choice in branch}:
            scope = next(branch[identity][0] for branch in branches if identity in branch)
            before = scope.get(identity[1], _MISSING)
            values = [branch[identity][1] if identity in branch else before for branch in branches]
            present = [value for value in values if value is not _MISSING]
            if present:
                self.store(scope, identity[1], _with_facts(either(present), facts))


def _with_facts(value: AbstractValue, facts: frozenset[Fact]) -> AbstractValue:
    """Adds facts to a number, a flag or a value without known structure; returns other values unchanged."""
    if not facts or (value.is_known and not isinstance(value.constant, (bool, int, float))):
        return value
    if value.alternatives:
        parts = tuple(_with_facts(alternative, facts) for alternative in value.alternatives)
        return replace(value, facts=value.facts | facts, alternatives=parts)
    structures = (value.function, value.class_object, value.instance_of, value.items, value.wraps, value.wrapper)
    if any(structure is not None for structure in structures) or value.is_object or value.called == "asynchronous":
        return value
    return replace(value, facts=value.facts | facts)


class ExitError(Exception):
    """Raised where the script raises an exception or exits."""


class ExecutionState:
    """The variables and the path of a rank, and the effects of the library calls that it has made.

    Args:
        identity: The simulated rank.
        module_name: The value of `__name__`.
        initialized: Whether communication is initialized when the script starts.
    """

    def __init__(self, identity: SimulatedRank, module_name: str, initialized: bool) -> None:
        self.identity = identity
        self.initialized = initialized
        self.seeded = False  # whether all ranks draw the same random numbers
        self.seeded_by_rank = False  # whether each rank draws different random numbers
        self.start_method: object = None  # the multiprocessing start method, such as "spawn"
        self.process_count: int | None = None  # number of started processes, if it is a constant
        self.path = ExecutionPath(RankTrace(identity.rank))
        self.returns: list[AbstractValue] = []  # the values that the current function returns
        self._module: Scope = {"__name__": known(module_name)}
        self._builtins: Scope = {}
        self.scopes: tuple[Scope, ...] = (self._module,)
        self._globals: set[str] = set()
        self._log = AssignmentLog()
        self._conditions_of_starter: list[PathCondition] = []  # the path to the call that started this process

    def restart(self) -> None:
        """Restarts at the beginning of the module, and keeps the variables that the script has assigned."""
        self.path.conditions, self.path.loops, self.scopes = [], [], (self._module,)

    # Variables

    def store(self, target: Scope, key: str, value: AbstractValue) -> None:
        """Assigns a value to a variable in a scope or to an attribute of an object."""
        self._log.store(target, key, value)

    def assign(self, name: str, value: AbstractValue) -> None:
        """Assigns a value to a variable of the current function, or of the module if it is declared as global."""
        self.store(self._module if name in self._globals else self.scopes[-1], name, value)

    def define(self, name: str, value: AbstractValue) -> None:
        """Defines a function, a class or an imported module in the innermost scope."""
        self.store(self.scopes[-1], name, value)

    def declare_global(self, names: Sequence[str]) -> None:
        """Makes the current function's assignments to these variables apply to the module."""
        self._globals |= set(names)

    def lookup(self, name: str) -> AbstractValue:
        """Returns the value of a variable."""
        for scope in reversed(self.scopes):
            if name in scope:
                return self.named(name, scope[name])
        return self.named(name, self._builtins.setdefault(name, AbstractValue(name)))

    def named(self, name: str, value: AbstractValue) -> AbstractValue:
        """Infers an unknown value from the name of its variable, such as `local_rank`."""
        if not value.is_plain or "lora" in value.text:
            return value
        number = self.identity.number_named(name)
        if number is None or (number.constant is True and not number.facts and value.is_module):
            return value
        number.called = value.text
        return number

    # Branches

    def branch(
        self, node: ast.AST, test: AbstractValue, then: Callable[[], Flow], otherwise: Callable[[], Flow]
    ) -> tuple[Flow, PathCondition | None]:
        """Interprets one branch if the result of the test is known, otherwise both; merges the assignments.

        Returns the ways in which the branches can end. If only one of two branches continues, also returns the
        condition of that branch.
        """
        truth = test.truth()
        if truth is None and not test.is_computed_by_a_call:  # an enclosing test may have decided it
            truth = next((condition.outcome for condition in self._decided() if condition.text == test.text), None)
        if truth is not None:
            return self.run_if(PathCondition.of(node, test, truth), then if truth else otherwise), None
        flows: list[Flow] = []
        assignments: list[Assignments] = []
        for outcome, run in ((True, then), (False, otherwise)):
            self._log.begin()
            flow = self.run_if(PathCondition.of(node, test, outcome), run)
            assigned = self._log.undo()
            flows.append(flow)
            if flow & {"next", "continue", "break"}:
                assignments.append(assigned)
        self._log.merge(assignments, test.facts & {Fact.PER_RANK, Fact.CLOCK})
        continuing = ["next" in flow for flow in flows]
        condition = PathCondition.of(node, test, continuing[0]) if sum(continuing) == 1 else None
        return flows[0] | flows[1], condition

    def _decided(self) -> Iterator[PathCondition]:
        """Yields the tests on the current path, and the operands of `and` and `or` that their outcomes determine."""
        for condition in [*self._conditions_of_starter, *self.path.conditions]:
            yield condition
            test = getattr(condition.node, "test", None)
            if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is condition.outcome:
                word = " and " if condition.outcome else " or "
                yield from (replace(condition, text=part) for part in condition.text.split(word))

    def run_if(self, condition: PathCondition, run: Callable[[], Flow]) -> Flow:
        """Interprets a branch, and attaches the condition to the branch's events."""
        depth = len(self.path.conditions)
        self.path.conditions.append(condition)
        try:
            return run()
        except ExitError:
            return {"stop"}
        finally:
            del self.path.conditions[depth:]

    # Functions and processes

    @contextmanager
    def frame(self, *scopes: Scope) -> Iterator[None]:
        """Interprets the code in the `with` block as the body of a function with these scopes."""
        outer = self.scopes, self._globals, self.returns, self.path.outer_loops, self.path.without_gradients
        conditions = len(self.path.conditions)
        self.scopes, self._globals, self.returns, self.path.outer_loops = scopes, set(), [], len(self.path.loops)
        try:
            yield
        finally:
            del self.path.conditions[conditions:]
            self.scopes, self._globals, self.returns, self.path.outer_loops, self.path.without_gradients = outer

    @contextmanager
    def inner_scope(self) -> Iterator[None]:
        """Interprets the code in the `with` block with additional variables, such as those of a comprehension."""
        outer = self.scopes
        self.scopes = (*outer, {})
        try:
            yield
        finally:
            self.scopes = outer

    @contextmanager
    def process(self, phase: Phase) -> Iterator[None]:
        """Interprets the code in the `with` block as the code of another process."""
        outer = self.path.phase, self.initialized, self.path.conditions, self.path.loops, self.path.outer_loops
        starter, self._conditions_of_starter = self._conditions_of_starter, self.path.conditions
        if self.path.phase != "uncalled":
            self.path.phase = phase
            self.initialized = False
        self.path.conditions, self.path.loops, self.path.outer_loops = [], [], 0
        try:
            yield
        except ExitError:
            pass
        finally:
            self.path.phase, self.initialized, self.path.conditions, self.path.loops, self.path.outer_loops = outer
            self._conditions_of_starter = starter
