"""Static checks for common mistakes in training scripts."""

from __future__ import annotations

import ast

from paceline.cli.doctor.command import Diagnostic
from paceline.cli.doctor.script import library_call, rank_rules, training_rules
from paceline.cli.doctor.script.interpreter import RankInterpreter
from paceline.cli.doctor.script.trace import JobTrace
from paceline.cli.doctor.script.value import SimulatedRank

_LAUNCHED = (8, 4)
"""The world size and the ranks per machine of the simulated job, if a launcher starts the script (on two machines)."""
_STARTED_BY_SCRIPT = (4, 4)


def check_script(text: str) -> list[Diagnostic]:
    """Interprets a script for every rank of a simulated job; returns the findings in line order.

    Raises:
        SyntaxError: the text is not valid Python.
    """
    tree = ast.parse(text)
    has_init = library_call.initializes(tree)
    first = RankInterpreter(tree, SimulatedRank(0, *_LAUNCHED), has_init=has_init)
    started = any(event.phase == "worker" for event in first.run().events)
    world_size, local_size = _STARTED_BY_SCRIPT if started else _LAUNCHED
    if started and first.process_count is not None:
        world_size = local_size = min(max(first.process_count, 2), 8)
    identities = [SimulatedRank(rank, world_size, local_size) for rank in range(world_size)]
    interpreters = [RankInterpreter(tree, identity, has_init=has_init) for identity in identities]
    traces = [interpreter.run() for interpreter in interpreters]
    called = set().union(*(interpreter.entered for interpreter in interpreters))
    for interpreter in interpreters:
        interpreter.run_uncalled(called)
    imported = RankInterpreter(tree, identities[0], "__mp_main__", has_init).run()
    job = JobTrace(tree, traces, local_size, imported)
    findings = [finding for rule in (*rank_rules.RULES, *training_rules.RULES) for finding in rule(job)]
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.line or 0)
