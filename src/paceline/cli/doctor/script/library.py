"""Semantics of library calls: the values that they return on a rank, and the events that they add to its trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from paceline.cli.doctor.script.communication_calls import communicate, rank_query, start_processes
from paceline.cli.doctor.script.library_call import (
    ExitError,
    LibraryCall,
    is_loader,
    is_module,
    is_torch_module,
    is_work,
    wrapped_owner,
)
from paceline.cli.doctor.script.training_calls import (
    WRAPPERS,
    access_files,
    build_model,
    call_method,
    note_use,
    read_data,
    select_device,
)
from paceline.cli.doctor.script.value import AbstractValue, Fact, either, inherited_facts, known, shortened

_CLOCKS = {"time", "perf_counter", "monotonic", "process_time", "now", "utcnow", "today", "default_timer", "strftime"}
_PER_RANK = {
    "uuid1", "uuid4", "getpid", "gethostname", "node", "mkdtemp", "mkstemp", "NamedTemporaryFile",
    "TemporaryDirectory", "TemporaryFile", "random", "randint", "getrandbits", "token_hex", "hostname", "choice",
    "mktemp",
}  # fmt: skip
_RANDOM_TENSORS = {"randn", "rand", "randint", "randperm", "randn_like", "rand_like", "normal"}
_FINITENESS = {"isnan", "isinf", "isfinite"}
_REDUCES = re.compile(
    r"reduce|gather|sync|broadcast|average|all_?mean|dist_|consensus|agree|vote|every_rank|any_rank", re.I
)
_NOT_ESCAPING = {
    "enumerate", "tqdm", "zip", "iter", "len", "print", "isinstance", "range", "list", "tuple", "next", "islice",
    "cycle", "id", "type", "str", "repr", "DataLoader", "trange", "min", "max", "sum", "float", "int", "bool",
    "hasattr", "getattr", "DistributedSampler", "chain", "sorted", "reversed", "cat", "stack",
}  # fmt: skip
_EXITS = {"sys.exit", "exit", "quit", "os._exit"}
_CONVERSIONS: dict[str, Callable[..., object]] = {
    "int": int, "float": float, "str": str, "bool": bool, "abs": abs, "min": min, "max": max, "range": range,
}  # fmt: skip


def perform(call: LibraryCall) -> AbstractValue:
    """Returns the result of a call, and records its events."""
    if call.callee.is_known:
        return rank_query(call)
    if call.callee.called_name == "partial" and call.callee.arguments:
        function, *first = call.callee.arguments
        return call.interpreter.call(
            function, [*first, *call.arguments], call.callee.keywords | call.keywords, call.node
        )
    if call.path in _EXITS:
        raise ExitError
    for meaning in _MEANINGS:
        result = meaning(call)
        if result is not None:
            return result
    return _unknown(call)


def _builtin(call: LibraryCall) -> AbstractValue | None:
    if call.path == "dict":
        entries = {f"['{name}']": value for name, value in call.keywords.items()}
        copied = {key: value for each in call.arguments for key, value in each.attributes.items() if key[:1] == "["}
        return AbstractValue("dict()", attributes=copied | entries)
    first = call.arguments[0] if call.arguments else None
    if call.path != call.name or first is None:
        return None
    if call.name in ("int", "float", "str", "bool", "abs", "min", "max", "range"):
        return _converted(call.name, call.arguments)
    if call.name == "len":
        return known(len(first.items)) if first.items is not None else AbstractValue(f"len({first.text})")
    if (
        call.name in ("getattr", "hasattr", "setattr")
        and len(call.arguments) > 1
        and isinstance(call.arguments[1].constant, str)
    ):
        attribute = call.arguments[1].constant
        if call.name == "getattr":
            return call.interpreter.attribute(first, attribute)
        if call.name == "setattr" and len(call.arguments) > 2:
            if is_torch_module(call.arguments[2]) and wrapped_owner(first) is not None:
                call.record("change", f'setattr(..., "{attribute}", ...)', first)
            call.interpreter.store(first.attributes, attribute, call.arguments[2])
            return known(None)
        return known(True) if attribute == "module" and first.wraps is not None else None
    if call.name == "isinstance" and len(call.arguments) > 1 and first.wraps is not None:
        return known(call.arguments[1].last_name in WRAPPERS) if call.arguments[1].items is None else None
    if call.name in ("list", "tuple", "sorted", "reversed") and first.items is not None:
        return AbstractValue(first.text, items=list(first.items), facts=first.facts)
    if call.name == "print":
        for value in call.arguments:
            note_use(call.interpreter, value, call.node)
        return known(None)
    return None


def _converted(name: str, arguments: list[AbstractValue]) -> AbstractValue:
    if len(arguments) == 1 and arguments[0].alternatives:
        return either(_converted(name, [each]) for each in arguments[0].alternatives)
    facts = frozenset().union(*(value.facts for value in arguments)) - {Fact.OPAQUE}
    if all(value.is_known for value in arguments):
        with suppress(Exception):
            return known(_CONVERSIONS[name](*(value.constant for value in arguments)), facts)
    text = shortened(f"{name}({', '.join(value.text for value in arguments)})")
    return AbstractValue(text, facts=facts, arguments=tuple(arguments))


def _unknown(call: LibraryCall) -> AbstractValue:
    values = [*call.arguments, *call.keywords.values()]
    facts = inherited_facts([*values, call.callee])
    number = call.interpreter.identity.number_named(call.name)
    if number is not None and not facts:
        return number  # an imported function, such as is_main_process
    if path_key := _environment_key(call.callee, call.arguments):
        number = call.interpreter.identity.number_named(path_key)
        if number is not None:
            return AbstractValue(repr(str(number.constant)), str(number.constant), number.facts)
    for value in values:
        if call.name not in _NOT_ESCAPING:
            if re.search("load|resume|restart|restore|checkpoint", call.name):
                for each in value.each():
                    each.escaped = True
            for each in value.contents():
                each.escaped |= is_loader(each) or is_work(each) or each.called_name == "DistributedSampler"
        if call.path.startswith("torch.") and call.name not in ("no_grad", "Event", "Stream"):
            note_use(call.interpreter, value, call.node)
        if value.function is not None and call.name != "partial":
            call.interpreter.branch(
                call.node, AbstractValue(f"{call.name} calls the function"),
                partial(_callback, call, value), lambda: {"next"},
            )  # fmt: skip
    if call.name in _CLOCKS:
        facts |= {Fact.CLOCK, Fact.PER_RANK}
    seeded = call.interpreter.seeded
    if (call.name in _PER_RANK and is_module(call.callee)) or (call.name in _RANDOM_TENSORS and not seeded):
        facts |= {Fact.PER_RANK}
    if call.name in ("manual_seed", "seed", "seed_everything", "set_seed", "manual_seed_all"):
        call.interpreter.seeded = not facts & {Fact.RANK, Fact.PERHAPS_RANK}
    if call.name in _FINITENESS:
        facts |= {Fact.FINITENESS}
    if _REDUCES.search(call.name):
        facts -= {Fact.PER_RANK, Fact.CLOCK, Fact.RANK, Fact.PERHAPS_RANK}
    if Fact.RANK in facts or (re.search("rank", call.name) and not facts):
        facts = (facts - {Fact.RANK}) | {Fact.PERHAPS_RANK}
    texts = [value.text for value in call.arguments] + [f"{key}={value.text}" for key, value in call.keywords.items()]
    text = f"{call.path}({', '.join(texts)})"
    if Fact.PERHAPS_RANK in facts:
        text += f" on rank {call.interpreter.identity.rank}"
    return AbstractValue(
        shortened(text), facts=facts, arguments=tuple(call.arguments), keywords=call.keywords, called=call.path,
        node=call.node, receiver=call.callee.receiver,
    )  # fmt: skip


def _environment_key(callee: AbstractValue, arguments: list[AbstractValue]) -> str:
    is_environment = callee.last_name == "getenv" or callee.text.endswith(("environ.get", "environ.setdefault"))
    key = arguments[0].constant if is_environment and arguments else None
    return key if isinstance(key, str) else ""


def _callback(call: LibraryCall, function: AbstractValue) -> set[str]:
    call.run(function, [AbstractValue("argument")])
    return {"next"}


_MEANINGS: tuple[Callable[[LibraryCall], AbstractValue | None], ...] = (
    _builtin, communicate, start_processes, build_model, read_data, access_files, select_device, call_method,
)  # fmt: skip
