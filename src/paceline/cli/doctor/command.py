"""The command line of `paceline doctor`, and the function that checks a script for mistakes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.cli.doctor import Confidence, Diagnostic, Severity, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "script", nargs="?", metavar="SCRIPT", help="a script to check for known mistakes; the script is not run"
    )
    parser.add_argument(
        "--confidence",
        choices=[confidence.value for confidence in Confidence],
        default=Confidence.HIGH.value,
        help="with a script, the lowest confidence of the findings to show; low also shows those that may be wrong",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--security",
        action="store_true",
        help="report how jobs are protected, where they listen, and who can reach them",
    )
    pair = parser.add_mutually_exclusive_group()
    pair.add_argument(
        "--listen",
        nargs="?",
        const=":0",
        metavar="[ADDRESS][:PORT]",
        help="wait for the doctor on another machine, and print the command to run there",
    )
    pair.add_argument(
        "--peer",
        metavar="TOKEN",
        help="check the network to and from the machine whose doctor printed TOKEN; - prompts for it",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the selected checks and prints their findings; returns 1 if any finding is bad, otherwise 0."""
    if options.script is not None:
        return _script(options.script, Confidence(options.confidence), options.json)
    if options.security:
        from paceline.cli.doctor.security import check_security

        return show(check_security(), options.json)
    from paceline.cli.doctor.machine import check_machine
    from paceline.errors import PacelineError

    findings = [] if options.listen or options.peer else check_machine()
    try:
        if options.listen:
            findings += _listen(options.listen)
        elif options.peer:
            findings += _visit(options.peer)
    except (PacelineError, OSError, ValueError) as error:
        findings.append(Diagnostic(Severity.BAD, "other machine", str(error)))
    return show(findings, options.json)


_LAUNCHED = (8, 4)
"""The world size and the number of ranks per machine in the simulated job, if a launcher starts the script."""
_STARTED_BY_SCRIPT = (4, 4)


def check_script(text: str) -> list[Diagnostic]:
    """Interprets a script for every rank of a simulated job; returns the findings in line order.

    Raises:
        SyntaxError: the text is not valid Python.
    """
    import ast

    from paceline.cli.doctor.script import library_call, rank_rules, training_rules
    from paceline.cli.doctor.script.interpreter import RankInterpreter
    from paceline.cli.doctor.script.trace import JobTrace
    from paceline.cli.doctor.script.value import SimulatedRank

    tree = ast.parse(text)
    has_init = library_call.initializes(tree)
    first = RankInterpreter(tree, SimulatedRank(0, *_LAUNCHED), has_init=has_init)
    started = any(event.phase == "worker" for event in first.run().events)
    world_size, local_size = _STARTED_BY_SCRIPT if started else _LAUNCHED
    if started and first.state.process_count is not None:
        world_size = local_size = min(max(first.state.process_count, 2), 8)
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


def _script(path: str, lowest: Confidence, as_json: bool) -> int:
    try:
        findings = check_script(Path(path).read_text())
    except (OSError, SyntaxError, ValueError) as error:
        print(f"paceline doctor: {path}: {error}", file=sys.stderr)
        return 2
    shown = [finding for finding in findings if lowest is Confidence.LOW or finding.confidence is Confidence.HIGH]
    if not shown and not as_json:
        print(f"  ok  {path}: none of the known mistakes was found")
    result = show(shown, as_json, path) if shown or as_json else 0
    hidden = len(findings) - len(shown)
    if hidden and not as_json:
        verb = "finding has" if hidden == 1 else "findings have"
        print(f"      {hidden} more {verb} low confidence; show all with --confidence low")
    return result


def _listen(address: str) -> list[Diagnostic]:
    import secrets

    from paceline.cli.doctor.network import serve
    from paceline.comm.store.tcp_store import listen_at_port
    from paceline.operate.launch.multinode.node_connection import own_address
    from paceline.operate.launch.shared_secret import JoinToken

    host, _, port = address.rpartition(":") if ":" in address else (address, "", "")
    host = host.strip("[]") or own_address()
    secret = secrets.token_bytes(32)
    with listen_at_port(host, int(port or 0), secret) as listener:
        token = JoinToken(host, listener.getsockname()[1], secret).encode()
        print(f"paceline doctor --peer -\n{token}", flush=True)
        return serve(listener, secret)


def _visit(word: str) -> list[Diagnostic]:
    from paceline.cli.doctor.network import probe
    from paceline.operate.launch.shared_secret import JoinToken, read_token

    token = JoinToken.decode(read_token() if word == "-" else word).require_printed()
    return probe((token.host, token.port), token.secret)
