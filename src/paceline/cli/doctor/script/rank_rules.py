"""Rules about code that must run identically on all ranks but does not, or that must run on only one rank."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from paceline.cli.doctor import Confidence, Diagnostic
from paceline.cli.doctor.script import library_call
from paceline.cli.doctor.script.trace import JobTrace, PathCondition, TraceEvent, first, found, who
from paceline.cli.doctor.script.value import Fact

_DIFFERENT = {Fact.PER_RANK, Fact.CLOCK}
_IN_MEMORY = {"BytesIO", "StringIO", "TemporaryFile", "SpooledTemporaryFile"}


def collectives(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports collectives that only some ranks call, or that the ranks call in different orders."""
    world_size = len(job.traces)
    reported = False
    for phase in (job.phase, "uncalled"):
        counts = job.counts("collective", phase=phase)
        balanced = _balanced(job, phase)
        for ranks in job.by_node("collective"):
            event = first(ranks)
            if event.node in balanced:
                continue
            numbers = [sum(not other.in_group for other in events) for events in ranks]
            if event.phase != phase or len(set(numbers)) == 1:
                continue
            if len({count[event.name] for count in counts}) == 1:
                continue  # the other ranks make the call elsewhere
            reported = True
            callers = [rank for rank, number in enumerate(numbers) if number]
            guard = event.guard()
            test = f" (the test is on line {getattr(guard.node, 'lineno', 0)})" if guard is not None else ""
            if len(callers) == world_size:
                reason = f"rank 0 makes the call {numbers[0]} times, and rank {world_size - 1} {numbers[-1]} times"
            else:
                reason = f"{who(callers, world_size)} would make this call{test}, and would wait there for the others"
            if event.name == "new_group":
                reason += "; all ranks must create a group, including those outside it"
            fix = "move the call out of the branch, so that all ranks make it"
            confidence = job.confidence(event, unless=event.guarded)
            yield found(event, "not-all-ranks", f"{event.name}()", reason, fix, confidence)
    if not reported:
        yield from _orders(job)
    for ranks in job.by_node("collective"):
        event = first(ranks)
        tests = [
            condition for condition in event.conditions
            if not condition.is_known and condition.facts & _DIFFERENT and not _ends_early(condition.node)
        ]  # fmt: skip
        if tests and not event.in_group and not event.guarded:
            line = getattr(tests[0].node, "lineno", 0)
            reason = (
                f"the test on line {line} depends on a value that differs between the ranks, so only some make the call"
            )
            fix = "all_reduce the condition first, and test the result"
            matched = any(
                call.name == event.name and not call.conditions for call in job.of(job.traces[0], "collective")
            )
            confidence = job.confidence(event, unless=matched)
            yield found(event, "not-all-ranks", f"{event.name}()", reason, fix, confidence)


def _balanced(job: JobTrace, phase: str) -> set[ast.AST]:
    """Returns the calls that some ranks make in one place and the other ranks in another.

    If some ranks make more calls in total than the others, also returns the calls that only the others make, because
    these calls are not the mistake.
    """
    numbers: dict[str, dict[ast.AST, tuple[int, ...]]] = {}
    order = {event.node: number for trace in job.traces for number, event in enumerate(trace.events)}
    for ranks in sorted(job.by_node("collective"), key=lambda ranks: order[first(ranks).node]):
        event = first(ranks)
        if event.phase == phase:
            counts = tuple(sum(not other.in_group for other in events) for events in ranks)
            numbers.setdefault(event.name, {})[event.node] = counts
    balanced: set[ast.AST] = set()
    for places in numbers.values():
        rest = {node: counts for node, counts in places.items() if len(set(counts)) > 1}
        while rest:
            node, counts = next(iter(rest.items()))
            del rest[node]
            sums = ((other, set(map(sum, zip(counts, rest[other], strict=True)))) for other in rest)
            partner = next((other for other, totals in sums if len(totals) == 1), None)
            if partner is not None:
                balanced |= {node, partner}
                del rest[partner]
        totals = list(map(sum, zip(*places.values(), strict=True)))
        several = {rank for rank, total in enumerate(totals) if total > min(totals)}
        if several:
            balanced |= {node for node, counts in places.items() if not any(counts[rank] for rank in several)}
    return balanced


def _ends_early(node: ast.AST) -> bool:
    """Returns True if a test only decides whether a loop or function ends early. (Another rule covers such tests.)"""
    ends = (ast.Break, ast.Continue, ast.Return, ast.Raise)
    exits = {"exit", "_exit", "quit", "abort"}
    return any(
        isinstance(inner, ends)
        or (isinstance(inner, ast.Call) and library_call.qualified_name(inner).rpartition(".")[2] in exits)
        for inner in ast.walk(node)
    )


def _orders(job: JobTrace) -> Iterator[Diagnostic]:
    sequences = [[call for call in job.of(trace, "collective") if not call.in_group] for trace in job.traces]
    for number, events in enumerate(zip(*sequences, strict=False)):
        names = [event.name for event in events]
        other = next((rank for rank, name in enumerate(names) if name != names[0]), None)
        if other is not None:
            reason = f"call number {number + 1} is {names[0]} on rank 0, but {names[other]} on rank {other}"
            fix = "make the calls in the same order on all ranks"
            yield found(events[0], "different-order", f"{names[0]}()", reason, fix, job.confidence(events[0]))
            return


def groups(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports groups that the ranks create with different members."""
    sequences = [[other for other in job.of(trace, "new_group") if not other.in_group] for trace in job.traces]
    for events in zip(*sequences, strict=False):
        members = [event.subject for event in events]
        if any(member is None for member in members):
            continue
        known = [member for member in members if member is not None]
        sets = [frozenset(item.constant if item.is_known else item.text for item in value.items or ()) or value.text
                for value in known]  # fmt: skip
        other = next((rank for rank, members in enumerate(sets) if members != sets[0]), None)
        if other is None:
            continue
        reason = f"the group has the ranks {known[0].text} on rank 0, but {known[other].text} on rank {other}"
        fix = "create all groups on all ranks in the same order, and use the one that contains the rank"
        uncertain = any(Fact.PERHAPS_RANK in value.facts for value in known)
        uncertain |= any(not condition.is_known for event in events for condition in event.conditions)
        confidence = job.confidence(events[0], unless=uncertain)
        yield found(events[0], "different-group", "new_group() with different ranks", reason, fix, confidence)
        return


def shared_outputs(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports lists of outputs that contain the same tensor several times."""
    for ranks in job.by_node("shared_outputs"):
        event = first(ranks)
        reason = "the list contains the same tensor several times, so every entry is overwritten by the last result"
        fix = "create one tensor per rank: [torch.empty_like(tensor) for _ in range(dist.get_world_size())]"
        yield found(event, "same-output", f"{event.name}() into [tensor] * n", reason, fix, job.confidence(event))


def roots(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports collectives whose root is not the same on all ranks."""
    for ranks in job.by_node("collective"):
        event = first(ranks)
        values = [events[0].subject for events in ranks if events and not events[0].in_group]
        known = [value.constant for value in values if value is not None and value.is_known]
        if len(known) == len(job.traces) and len(set(map(str, known))) > 1:
            reason = f"the root is {known[0]} on rank 0, but {known[1]} on rank 1"
            fix = "pass the same rank on all ranks, for example 0"
            yield found(event, "different-root", f"{event.name}()", reason, fix, job.confidence(event))


def messages(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports messages that no rank receives."""
    events = [event for trace in job.traces for event in job.of(trace, "message")]
    if any(event.in_group for event in events):
        return
    receivers = [
        [event.subject.constant if event.subject is not None else None for event in job.of(trace, "message")
         if event.name.endswith("recv")]
        for trace in job.traces
    ]  # fmt: skip
    for ranks in job.by_node("message"):
        for rank, sent in enumerate(ranks):
            for event in sent[:1]:
                peer = event.subject.constant if event.subject is not None else None
                if not isinstance(peer, int) or not 0 <= peer < len(receivers):
                    continue
                certain = job.confidence(event)
                if peer == rank:
                    reason = f"rank {rank} is both the sender and the receiver, which is not possible"
                    yield found(event, "message-to-itself", f"{event.name}()", reason, "pass another rank", certain)
                elif event.name.endswith("send") and not any(
                    not isinstance(source, int) or source == rank for source in receivers[peer]
                ):
                    reason = f"rank {rank} sends to rank {peer}, which receives nothing from it"
                    fix = f"call dist.recv(tensor, {rank}) on rank {peer}"
                    yield found(event, "no-receiver", f"{event.name}()", reason, fix, certain)
                else:
                    continue
                break
            else:
                continue
            break


def deadlocks(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports ranks that wait for messages from each other, because all of them receive before they send."""
    sequences = [list(job.of(trace, "message")) for trace in job.traces]
    for event in (other for events in sequences for other in events):
        is_certain = event.subject is not None and isinstance(event.subject.constant, int)
        if not is_certain or event.in_group or any(not condition.is_known for condition in event.conditions):
            return
    positions, sent = [0] * len(sequences), Counter[tuple[int, object]]()
    waits_for: dict[int, object] = {}
    progress = True
    while progress:
        progress = False
        waits_for.clear()
        for rank, events in enumerate(sequences):
            while positions[rank] < len(events):
                event = events[positions[rank]]
                peer = event.subject.constant if event.subject is not None else None
                if event.name.endswith("send"):
                    sent[rank, peer] += 1
                elif event.name == "recv" and isinstance(peer, int):
                    if not sent[peer, rank]:
                        waits_for[rank] = peer
                        break
                    sent[peer, rank] -= 1
                positions[rank] += 1
                progress = True
    for start in waits_for:
        chain = [start]
        while (after := waits_for.get(chain[-1])) is not None and after not in chain:
            assert isinstance(after, int)
            chain.append(after)
        if after == start:
            event = sequences[start][positions[start]]
            places = ", ".join(f"rank {rank} for rank {waits_for[rank]}" for rank in chain[:3])
            reason = f"the ranks wait for each other before they send: {places}"
            fix = "let one of them send first, or use isend or batch_isend_irecv"
            yield found(event, "receive-deadlock", "recv() before send()", reason, fix, job.confidence(event))
            return


def uneven_loops(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports loops that contain collectives or backward passes but that some ranks can leave early."""
    for ranks in job.by_node("leave"):
        event = first(ranks)
        loop = event.loops[-1]
        inside = [
            call for trace in job.traces for call in trace.of("collective")
            if loop in call.loops and not call.in_group
        ]  # fmt: skip
        if event.name == "continue":
            later = [inner for inner in inside if inner.line > event.line]
            is_endless = isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant)
            inside = [] if is_endless and len(later) == len(inside) else later  # the rank loops again; others wait
        if event.guarded or not inside:
            continue
        present = [bool(events) for events in ranks]
        different = _difference([_tests_around(events[0]) for events in ranks if events])
        if all(present) and different is None:
            continue
        facts = different.facts if different is not None else frozenset({Fact.RANK})
        reason = "it depends on the rank"
        if Fact.CLOCK in facts:
            reason = "it depends on a clock, which the ranks read at different moments"
        elif Fact.PER_RANK in facts:
            reason = "it depends on a value that differs between the ranks"
        reason += (
            f", so some ranks may leave the loop while the others wait in {inside[0].name}() on line {inside[0].line}"
        )
        fix = "decide together: all_reduce the condition with ReduceOp.MAX, and test the result"
        is_finiteness = event.name == "continue" and Fact.FINITENESS in facts
        is_computed = not facts & _DIFFERENT and (Fact.RANK not in facts or Fact.PERHAPS_RANK in facts)
        confidence = job.confidence(event, unless=is_finiteness or is_computed)
        yield found(event, "uneven-loop", f"{event.name} in a loop that all ranks run", reason, fix, confidence)


def _tests_around(event: TraceEvent) -> tuple[PathCondition, ...]:
    """Returns the tests around a statement that leaves a loop. Other findings cover the loop and earlier statements."""
    loop = event.loops[-1]
    return tuple(
        condition for condition in event.conditions
        if event.name == "while" or (condition.node is not loop and event.node in ast.walk(condition.node))
    )  # fmt: skip


def uneven_ranges(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports loops that contain collectives but run for different numbers of iterations on different ranks."""
    for ranks in job.by_node("iterate"):
        event = first(ranks)
        lengths = [
            len(events[0].subject.constant) if events and events[0].subject is not None
            and isinstance(events[0].subject.constant, range) else None for events in ranks
        ]  # fmt: skip
        inside = [call for call in job.traces[0].of("collective") if event.node in call.loops and not call.in_group]
        other = next((rank for rank, length in enumerate(lengths) if length != lengths[0]), None)
        if None in lengths or other is None or not inside or event.guarded:
            continue
        call = f"{inside[0].name}() on line {inside[0].line}"
        reason = f"rank 0 makes {lengths[0]} iterations, and rank {other} {lengths[other]}; they wait in {call}"
        fix = "let all ranks perform the same number of iterations"
        yield found(event, "uneven-loop", "a loop of different lengths", reason, fix, job.confidence(event))


def _difference(paths: list[tuple[PathCondition, ...]]) -> PathCondition | None:
    """Returns a condition whose result differs between the ranks, or None."""
    conditions: tuple[PathCondition, ...]
    for conditions in zip(*paths, strict=False):
        if conditions[0].is_known:
            continue
        if conditions[0].facts & _DIFFERENT or len({condition.text for condition in conditions}) > 1:
            return conditions[0]
    return None


def files(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports files that several ranks write, create or download under the same name."""
    emptied = {
        item.context_expr for node in ast.walk(job.tree) if isinstance(node, ast.With)
        for item in node.items if all(isinstance(statement, ast.Pass) for statement in node.body)
    }  # fmt: skip
    in_try = {
        inner for node in ast.walk(job.tree) if isinstance(node, ast.Try) and node.handlers
        for statement in node.body for inner in ast.walk(statement)
    }  # fmt: skip
    for ranks in job.by_node("write", "directory", "download"):
        event = first(ranks)
        writers = [rank for rank, events in enumerate(ranks) if events]
        if not _same_machine(job, writers) or not _same_file([events[0] for events in ranks if events]):
            continue
        uncertain = event.guarded or any(
            condition.depends_on_the_rank for condition in event.conditions if not condition.is_known
        )
        uncertain |= _is_ordered(job, event) or any(condition.is_callback for condition in event.conditions)
        every = "all ranks" if len(writers) == len(job.traces) else who(writers, len(job.traces))
        if event.kind == "write":
            uncertain |= event.node in emptied or '"a' in event.name or _precedes_init(job, event)
            uncertain |= _has_own_arguments(job, event)
            reason = f"{every} write the same file at the same time, and the result may be damaged"
            fix = "write if dist.get_rank() == 0: before it, and call dist.barrier() before a rank reads the file"
            name = "all-ranks-save"
        elif event.kind == "directory":
            uncertain |= event.node in in_try or any(not condition.is_known for condition in event.conditions)
            uncertain |= _precedes_init(job, event)
            reason = f"{every} create the same directory, and all but the first raise FileExistsError"
            fix = "pass exist_ok=True"
            name = "all-ranks-mkdir"
        else:
            before = [download for download in job.traces[0].of("download") if download.phase == "script" != job.phase]
            uncertain |= any(earlier.name == event.name for earlier in before)  # the files already exist
            reason = f"{every} download the same files at the same time, and the result may be damaged"
            fix = "download on rank 0 only, then call dist.barrier(), and read the files on all ranks"
            name = "all-ranks-download"
        confidence = job.confidence(event, unless=uncertain)
        yield found(
            event, name, f"{event.name} on {'every rank' if 'all' in every else every}", reason, fix, confidence
        )


def _same_machine(job: JobTrace, ranks: list[int]) -> bool:
    return len({rank // job.local_size for rank in ranks}) < len(ranks)


def _same_file(events: list[TraceEvent]) -> bool:
    paths = [event.subject for event in events if event.subject is not None]
    for path in paths:
        sources = list(path.sources())
        if path.facts & (_DIFFERENT | {Fact.RANK, Fact.PERHAPS_RANK}) or any(
            source.facts & _DIFFERENT for source in sources
        ):
            return False
        if any(source.called_name in _IN_MEMORY or source.called == "open" for source in sources):
            return False
        if "devnull" in path.text or path.constant in ("/dev/null", "/dev/stdout"):
            return False
    return len({path.text for path in paths}) <= 1


def _has_own_arguments(job: JobTrace, event: TraceEvent) -> bool:
    """Returns True if the path and the rank are both arguments of the script, so each rank may use a different path."""
    for init in job.of(job.traces[0], "init"):
        owner = init.result.called.rpartition(".")[0] if init.result is not None else ""
        path = event.subject
        if "parse_args" in owner and path is not None and any(owner in source.text for source in path.sources()):
            return True
    return False


def _precedes_init(job: JobTrace, event: TraceEvent) -> bool:
    """Returns True if an event occurs before the ranks are connected."""
    for other in job.of(job.traces[0], "init", event.kind):
        if other.kind == "init":
            return False
        if other.node is event.node:
            return any(True for _ in job.of(job.traces[0], "init"))
    return False


def _is_ordered(job: JobTrace, event: TraceEvent) -> bool:
    """Returns True if some ranks reach an event before the others, for example because of a barrier."""
    before = []
    for trace in job.traces:
        events = list(job.of(trace, "collective", event.kind))
        position = next((number for number, other in enumerate(events) if other.node is event.node), len(events))
        before.append([earlier.name for earlier in events[:position] if earlier.kind in ("collective", "download")])
    return any(earlier != before[0] for earlier in before)


def initialization(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports calls that require the process group but are made before it is created."""
    first_events: dict[ast.AST, TraceEvent] = {}
    for trace in job.traces:
        early: list[TraceEvent] = []
        for event in job.of(trace, "init", "wrap", "collective", "query", "message"):
            if event.kind == "init":
                for earlier in early if event.name not in ("Accelerator", "imported") else ():
                    first_events.setdefault(earlier.node, earlier)
                break
            early.append(event)
        if first_events:
            break
    for event in sorted(first_events.values(), key=lambda event: event.line):
        reason = "the process group does not exist yet"
        fix = "call init_process_group() before it"
        uncertain = any(not condition.is_known for condition in event.conditions)
        confidence = job.confidence(event, unless=uncertain)
        yield found(event, "before-init", f"{event.name}() before init_process_group()", reason, fix, confidence)


def waits(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports asynchronous calls that the script does not wait for."""
    unfinished: dict[ast.AST, str] = {}
    for trace in job.traces:
        for work in trace.objects:
            if not work.escaped and not work.methods_called & {"wait", "synchronize"} and work.node is not None:
                unfinished[work.node] = work.keywords["operation"].text
    for ranks in job.by_node("collective", "message"):
        event = first(ranks)
        if event.node in unfinished:
            reason = "the call may still be running when the tensor is used, and its errors are not reported"
            fix = "keep the result, and call work.wait() before the tensor is used"
            seen = f"{unfinished[event.node]}() without wait()"
            yield found(event, "no-wait", seen, reason, fix, job.confidence(event))
    for ranks in job.by_node("race"):
        event = first(ranks)
        if event.subject is None or event.subject.node in unfinished:
            continue
        line = getattr(event.subject.node, "lineno", 0)
        reason = f"the asynchronous call on line {line} may still be reading or writing this tensor"
        fix = "call work.wait() before this line"
        yield found(event, "use-before-wait", "a tensor in use by a running call", reason, fix, job.confidence(event))


def processes(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports processes that cannot start because they run the script again or cannot import their function."""
    for event in job.imported.of("spawn"):
        if event.phase == "uncalled":
            continue
        reason = "each new process imports this file, reaches this call and raises RuntimeError"
        fix = 'put the call in if __name__ == "__main__":'
        uncertain = any(not condition.is_known for condition in event.conditions)
        confidence = Confidence.LOW if uncertain else Confidence.HIGH
        yield found(event, "no-main-guard", f"{event.name}() at import", reason, fix, confidence)
    yield from _loader_processes(job)
    for event in job.traces[0].of("spawn"):
        function = event.subject.function if event.subject is not None else None
        if function is not None and (isinstance(function.node, ast.Lambda) or function.is_nested):
            what = "a lambda" if isinstance(function.node, ast.Lambda) else "a nested function"
            reason = f"new processes import the function, which is not possible for {what}"
            fix = "define the function at the top level of the file"
            yield found(event, "spawn-target", f"{event.name}() of {what}", reason, fix)


def _loader_processes(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports loops over data loaders whose worker processes import the script and would therefore train again."""
    sets_method = any(name.endswith("set_start_method") for name in _called_names(job.tree))
    for event in job.imported.of("iterate"):
        if event.phase == "uncalled" or event.subject is None:
            continue
        for loader in library_call.loaders_in(event.subject):
            workers, context = loader.keywords.get("num_workers"), loader.keywords.get("multiprocessing_context")
            if workers is None or not isinstance(workers.constant, int) or workers.constant < 1:
                continue
            method = context.constant if context is not None else None
            if method is None or library_call.imports_script(method):
                reason = "each worker process of the loader imports this file and runs it again"
                if method is None:
                    reason += "; since Python 3.14, the default start method on Linux is forkserver"
                fix = 'put the training code in if __name__ == "__main__":, or use multiprocessing_context="fork"'
                uncertain = any(not condition.is_known for condition in event.conditions) or not job.is_distributed
                uncertain |= method is None and (sets_method or not library_call.FORKSERVER_IS_DEFAULT)
                confidence = Confidence.LOW if uncertain else Confidence.HIGH
                yield found(event, "no-main-guard", "DataLoader with workers at import", reason, fix, confidence)


def _called_names(tree: ast.AST) -> Iterator[str]:
    return (library_call.qualified_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))


RULES = (
    collectives, groups, shared_outputs, roots, messages, deadlocks, uneven_loops, uneven_ranges, files,
    initialization, waits, processes,
)  # fmt: skip
