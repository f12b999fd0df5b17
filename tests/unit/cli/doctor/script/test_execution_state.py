"""Variables, branches, functions and processes of a simulated rank."""

from __future__ import annotations

import ast
from collections.abc import Callable

from paceline.cli.doctor.script.execution_state import ExecutionState, ExitError
from paceline.cli.doctor.script.trace import PathCondition
from paceline.cli.doctor.script.value import AbstractValue, SimulatedRank, known

TEST = ast.parse("if unknown: pass").body[0]


def state_of(rank: int = 1) -> ExecutionState:
    return ExecutionState(SimulatedRank(rank, 8, 4), "__main__", initialized=False)


def assigning(state: ExecutionState, name: str, value: int) -> Callable[[], set[str]]:
    def run() -> set[str]:
        state.assign(name, known(value))
        return {"next"}

    return run


def exits() -> set[str]:
    raise ExitError


def test_an_unknown_test_leaves_the_values_of_both_branches():
    state = state_of()
    state.assign("x", known(0))
    state.branch(TEST, AbstractValue("unknown"), assigning(state, "x", 1), lambda: {"next"})
    assert {each.constant for each in state.lookup("x").each()} == {0, 1}


def test_a_branch_that_exits_leaves_no_values_but_a_condition():
    state = state_of()
    flow, condition = state.branch(TEST, AbstractValue("unknown"), exits, assigning(state, "x", 2))
    assert flow == {"stop", "next"}
    assert condition is not None
    assert (condition.text, condition.outcome) == ("unknown", False)
    assert state.lookup("x").constant == 2


def test_an_enclosing_test_decides_an_equal_test():
    state = state_of()
    flow = state.run_if(
        PathCondition.of(TEST, AbstractValue("unknown"), False),
        lambda: state.branch(TEST, AbstractValue("unknown"), exits, lambda: {"next"})[0],
    )
    assert flow == {"next"}
    assert state.path.conditions == []


def test_a_function_assigns_its_own_variables_or_globals():
    state = state_of()
    module = state.scopes
    with state.frame(*module, {}):
        state.declare_global(["shared"])
        state.assign("shared", known(1))
        state.assign("own", known(2))
        state.returns.append(known(3))
    assert state.lookup("shared").constant == 1
    assert not state.lookup("own").is_known
    assert state.returns == []


def test_a_variable_without_a_value_is_inferred_from_its_name():
    assert state_of(5).lookup("local_rank").constant == 1


def test_the_exit_of_a_process_does_not_end_its_starter():
    state = state_of()
    state.initialized = True
    with state.process("worker"):
        assert (state.path.phase, state.initialized) == ("worker", False)
        raise ExitError
    assert (state.path.phase, state.initialized) == ("script", True)
