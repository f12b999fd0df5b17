"""Semantics of library calls: the values that they return on a rank, and the events that they add to its trace."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from paceline.cli.doctor.script.execution_state import ExecutionState, ExitError
from paceline.cli.doctor.script.library_call import (
    COMMUNICATORS,
    INITIALIZERS,
    LibraryCall,
    imports_script,
    is_different_on_each_rank,
    is_function,
    is_loader,
    is_torch_module,
    is_work,
    is_world,
    starts_processes,
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

_COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_coalesced",
    "all_gather_single", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "broadcast_coalesced", "broadcast_object_list", "check_replicas", "gather", "gather_object", "init_device_mesh",
    "monitored_barrier", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "split_group",
    "mean_over_samples", "allreduce", "allgather", "alltoall", "broadcast_parameters", "broadcast_optimizer_state",
    "broadcast_object", "grouped_allreduce", "allreduce_", "broadcast_", "_all_gather_base", "_reduce_scatter_base",
}  # fmt: skip
_ONLY_THE_ROOT_RECEIVES = {"reduce", "gather", "gather_object"}
_ROOTS = {"broadcast": 1, "reduce": 1, "broadcast_object_list": 1, "gather": 2, "scatter": 2, "scatter_object_list": 2}
_PEERS = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
_COLLECTIVE_METHODS = {
    "wait_for_everyone", "gather_for_metrics", "consolidate_state_dict", "full_optim_state_dict", "optim_state_dict",
    "sharded_optim_state_dict",
}  # fmt: skip
_SETUP = re.compile(r"(init|setup|set_up|start|launch)\w*(dist|process_group|ddp)|(dist|ddp)\w*_(init|setup)", re.I)
_GROUP_NAME = re.compile(r"(group|mesh|pg|comm|subgroup|ranks)s?(\b|_|\[|\()", re.I)
_DEVICE = re.compile(r"device|cuda|gpu", re.I)
_RUNNERS = {"app.run", "absl.app.run", "fire.Fire", "fire.core.Fire", "typer.run", "tyro.cli"}
_LAUNCHERS = {
    "launch", "notebook_launcher", "notebook_launch", "launch_distributed", "elastic_launch", "run_distributed",
    "call_main",
}  # fmt: skip
_LAUNCHER_LIBRARIES = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"}
_SPAWNING_MODULES = COMMUNICATORS | {"torch.multiprocessing", "mp", "xmp"}


def rank_query(call: LibraryCall) -> AbstractValue:
    """Returns the result of a function whose result is known on every rank, such as `get_rank`."""
    module, _, name = call.callee.called.rpartition(".")
    if name in ("get_rank", "get_world_size"):
        group = call.argument(0, "group")
        if group is not None and not is_world(group):
            text = f"{name} of {group.text} on rank {call.state.identity.rank}"
            return AbstractValue(text, facts=frozenset({Fact.PERHAPS_RANK}))
        if module in COMMUNICATORS:
            call.record("query", name)
    return call.callee


def communicate(call: LibraryCall) -> AbstractValue | None:
    """Interprets calls that initialize communication, run collectives or transfer messages."""
    if call.name == "is_initialized":
        return known(call.state.initialized)
    if call.name in ("is_available", "is_nccl_available", "is_gloo_available"):
        return known(True)
    if call.module.startswith("torch.distributed.rpc") or call.name in ("rpc_sync", "rpc_async"):
        call.record("rpc", call.name)
        return None
    is_horovod = call.module.endswith(("hvd", "horovod", "horovod.torch"))
    if is_horovod and call.name in ("size", "local_size"):
        return call.state.identity.number_named("world_size" if call.name == "size" else "local_size")
    modules = COMMUNICATORS if call.name == "init_process_group" else {"deepspeed", "deepspeed.comm"}
    is_initializer = call.name in INITIALIZERS and call.module in modules
    is_launcher = call.name in ("Accelerator", "Fabric") and call.module.partition(".")[0] in _LAUNCHER_LIBRARIES
    if is_initializer or (call.name == "init" and is_horovod) or is_launcher:
        _initialize(call)
    elif _SETUP.search(call.name) and call.callee.is_module:
        call.record("init", "imported")
    elif call.name in _COLLECTIVE_METHODS and call.callee.receiver is not None:
        call.record("collective", call.name)
    elif call.module in COMMUNICATORS and call.name in _PEERS:
        return _send_or_receive(call)
    elif (call.module in COMMUNICATORS and call.name in _COLLECTIVES) or (
        call.name in ("save", "load") and call.module in ("torch.distributed.checkpoint", "paceline")
    ):
        return _collective(call)
    return None


def _initialize(call: LibraryCall) -> None:
    call.state.initialized = True
    backend, rank = call.argument(0, "backend"), call.keywords.get("rank")
    is_only_rank = rank is not None and isinstance(rank.constant, int) and not rank.facts
    is_alone = is_only_rank or (backend is not None and backend.constant == "fake")
    call.record("init", "alone" if is_alone else call.name, backend, rank)


def _send_or_receive(call: LibraryCall) -> AbstractValue:
    peer = call.argument(1, _PEERS[call.name])
    work = _asynchronous(call) if call.name.startswith("i") else None
    call.record("message", call.name, peer, work, _in_group(call, 2))
    if call.name.endswith("recv") and call.arguments:
        call.arguments[0].facts |= {Fact.PER_RANK}
    return work or AbstractValue(f"{call.name}()")


def _collective(call: LibraryCall) -> AbstractValue:
    root = call.argument(_ROOTS.get(call.name, -1), "src", "dst", "root_rank")
    flags = [*call.arguments[1:], call.keywords.get("async_op")]
    is_async = any(flag is not None and flag.constant is True for flag in flags)
    work = _asynchronous(call) if is_async else None
    in_group = _in_group(call, 1)
    if call.name == "new_group":
        local = call.keywords.get("use_local_synchronization")
        in_group = local is not None and local.truth() is not False
        call.record("new_group", call.name, call.argument(0, "ranks"), in_group=in_group)
    call.record("collective", call.name, root, work, in_group)
    outputs = call.argument(1 if call.name == "gather" else 0, "gather_list", "tensor_list", "output_tensor_list")
    if call.name in ("all_gather", "gather") and outputs is not None and outputs.called == "repeated list":
        call.record("shared_outputs", call.name, outputs)
    if call.name not in _ONLY_THE_ROOT_RECEIVES | {"new_group"} and call.arguments:
        call.arguments[0].make_equal_on_all_ranks(call.line)
    facts = inherited_facts(call.arguments[:1])
    return work or AbstractValue(f"{call.name} on line {call.line}", facts=facts, called=call.path)


def _in_group(call: LibraryCall, first: int) -> bool:
    """Returns True if an argument at index `first` or later is a group other than WORLD."""
    values = [call.keywords[key] for key in ("group", "process_group", "pg", "device_mesh") if key in call.keywords]
    unnamed = (argument for argument in call.arguments[first:] if not argument.is_known)
    values += [value for value in unnamed if _GROUP_NAME.search(value.called or value.text)]
    return any(not is_world(value) for value in values)


def _asynchronous(call: LibraryCall) -> AbstractValue:
    """Returns the Work of an asynchronous call. The call uses its tensors until the script has waited for the Work."""
    work = AbstractValue(f"{call.name} on line {call.line}", called="asynchronous", node=call.node)
    work.keywords = {"operation": AbstractValue(call.name)}
    work.escaped = call.state.path.phase == "uncalled"
    for tensor in call.arguments[:2]:
        if not tensor.is_known and call.name != "isend":
            tensor.pending = work
    call.state.path.trace.objects.append(work)
    return work


def start_processes(call: LibraryCall) -> AbstractValue | None:
    """Interprets the functions that new processes run."""
    if call.name in ("spawn", "start_processes") and call.module in _SPAWNING_MODULES:
        function, passed, method = call.argument(0, "fn"), call.argument(1, "args"), call.keywords.get("start_method")
        call.record("fork" if method is not None and method.constant == "fork" else "spawn", call.name, function)
        count = call.argument(2, "nprocs")
        if count is not None and isinstance(count.constant, int) and not count.facts:
            call.state.process_count = count.constant
        rank = known(call.state.identity.rank, frozenset({Fact.RANK}))
        if function is not None:
            _run_worker(call, function, [rank, *_items(passed)])
        return AbstractValue("spawned processes")
    if call.name == "set_start_method" and call.arguments:
        call.state.start_method = call.arguments[0].constant
        return known(None)
    target = call.keywords.get("target")
    if call.name == "Process" and target is not None:
        method_name, context = call.state.start_method, call.callee.receiver
        if context is not None and context.called_name == "get_context" and context.arguments:
            method_name = context.arguments[0].constant
        call.record("spawn" if imports_script(method_name) else "fork", call.name, target)
        _run_worker(call, target, _items(call.keywords.get("args")))
        return AbstractValue(f"process on line {call.line}", called="Process")
    if call.name in _LAUNCHERS:
        for function in filter(is_function, [*call.arguments, *call.keywords.values()]):
            _run_worker(call, function, [])
        return AbstractValue("launched processes")
    return None


def _items(value: AbstractValue | None) -> list[AbstractValue]:
    return list(value.items or ()) if value is not None else []


def _run_worker(call: LibraryCall, function: AbstractValue, arguments: list[AbstractValue]) -> None:
    with call.state.process("worker"):
        call.run(function, arguments)


_CLOCKS = {"time", "perf_counter", "monotonic", "process_time", "now", "utcnow", "today", "default_timer", "strftime"}
_PER_RANK = {
    "uuid1", "uuid4", "getpid", "gethostname", "node", "mkdtemp", "mkstemp", "NamedTemporaryFile",
    "TemporaryDirectory", "TemporaryFile", "random", "randint", "getrandbits", "token_hex", "hostname", "choice",
    "mktemp",
}  # fmt: skip
_RANDOM_TENSORS = {"randn", "rand", "randint", "randperm", "randn_like", "rand_like", "normal"}
_ABOUT_THE_TYPE = {"isinstance", "issubclass", "type", "callable", "hasattr", "numel", "size", "dim"}
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
        return call.run(function, [*first, *call.arguments], call.callee.keywords | call.keywords)
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
        copied = {
            key: value for argument in call.arguments for key, value in argument.attributes.items() if key[:1] == "["
        }
        return AbstractValue("dict()", attributes=copied | entries)
    first = call.arguments[0] if call.arguments else None
    if call.path != call.name or first is None:
        return None
    if call.name in ("int", "float", "str", "bool", "abs", "min", "max", "range"):
        return _converted(call.name, call.arguments)
    if call.name == "len":
        return known(len(first.items)) if first.items is not None else AbstractValue(f"len({first.text})")
    if call.name in ("hasattr", "setattr") and len(call.arguments) > 1 and isinstance(call.arguments[1].constant, str):
        attribute = call.arguments[1].constant
        if call.name == "setattr" and len(call.arguments) > 2:
            if is_torch_module(call.arguments[2]) and wrapped_owner(first) is not None:
                call.record("change", f'setattr(..., "{attribute}", ...)', first)
            call.state.store(first.attributes, attribute, call.arguments[2])
            return known(None)
        return known(True) if attribute == "module" and first.wraps is not None else None
    if call.name == "isinstance" and len(call.arguments) > 1 and first.wraps is not None:
        return known(call.arguments[1].last_name in WRAPPERS) if call.arguments[1].items is None else None
    if call.name in ("list", "tuple", "sorted", "reversed") and first.items is not None:
        return AbstractValue(first.text, items=list(first.items), facts=first.facts)
    if call.name == "print":
        for value in call.arguments:
            note_use(call.state.path, value, call.node)
        return known(None)
    return None


def _converted(name: str, arguments: list[AbstractValue]) -> AbstractValue:
    if len(arguments) == 1 and arguments[0].alternatives:
        return either(_converted(name, [alternative]) for alternative in arguments[0].alternatives)
    facts = frozenset().union(*(value.facts for value in arguments)) - {Fact.OPAQUE}
    if all(value.is_known for value in arguments):
        with suppress(Exception):
            return known(_CONVERSIONS[name](*(value.constant for value in arguments)), facts)
    text = shortened(f"{name}({', '.join(value.text for value in arguments)})")
    return AbstractValue(text, facts=facts, arguments=tuple(arguments))


def _unknown(call: LibraryCall) -> AbstractValue:
    values = [*call.arguments, *call.keywords.values()]
    facts = inherited_facts([*values, call.callee])
    number = call.state.identity.number_named(call.name)
    if number is not None and not facts:
        return number  # an imported function, such as is_main_process
    if path_key := _environment_key(call.callee, call.arguments):
        number = call.state.identity.number_named(path_key)
        if number is not None:
            return AbstractValue(repr(str(number.constant)), str(number.constant), number.facts)
    for value in values:
        if call.name not in _NOT_ESCAPING:
            if re.search("load|resume|restart|restore|checkpoint", call.name):
                for alternative in value.each():
                    alternative.escaped = True
            for element in value.contents():
                element.escaped |= is_loader(element) or is_work(element) or element.called_name == "DistributedSampler"
        if call.path.startswith("torch.") and call.name not in ("no_grad", "Event", "Stream"):
            note_use(call.state.path, value, call.node)
        if value.function is not None and call.path in _RUNNERS:
            call.run(value, [])
        elif value.function is not None and call.name != "partial":
            call.state.branch(
                call.node, AbstractValue(f"{call.name} calls the function"),
                partial(_callback, call, value), lambda: {"next"},
            )  # fmt: skip
    if call.path == "deepspeed.initialize":
        call.record("set_device", "imported")
    if _DEVICE.search(call.name) and call.callee.is_module and not call.path.startswith("torch."):
        call.record("set_device", "imported")
    if call.name in _CLOCKS:
        facts |= {Fact.CLOCK, Fact.PER_RANK}
    seeded = call.state.seeded
    if (call.name in _PER_RANK and call.callee.is_module) or (call.name in _RANDOM_TENSORS and not seeded):
        facts |= {Fact.PER_RANK}
    if call.name in ("manual_seed", "seed", "seed_everything", "set_seed", "manual_seed_all"):
        call.state.seeded = not facts & {Fact.RANK, Fact.PERHAPS_RANK}
        if call.module != "numpy.random":
            call.state.seeded_by_rank = Fact.RANK in facts and call.module.startswith("torch")
    if call.name == "random_split":  # here, the fact applies to the indices, not to the samples
        facts -= {Fact.PER_RANK}
        if call.state.seeded_by_rank and call.argument(2, "generator") is None:
            facts |= {Fact.PER_RANK}
    if call.name in _FINITENESS:
        facts |= {Fact.FINITENESS}
    if call.name in _ABOUT_THE_TYPE:
        facts -= {Fact.PER_RANK, Fact.CLOCK}
    if _REDUCES.search(call.name):
        facts -= {Fact.PER_RANK, Fact.CLOCK, Fact.RANK, Fact.PERHAPS_RANK}
    if Fact.RANK in facts or (re.search("rank", call.name) and not facts):
        facts = (facts - {Fact.RANK}) | {Fact.PERHAPS_RANK}
    texts = [value.text for value in call.arguments] + [f"{key}={value.text}" for key, value in call.keywords.items()]
    text = f"{call.path}({', '.join(texts)})"
    if Fact.PERHAPS_RANK in facts:
        text += f" on rank {call.state.identity.rank}"
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


def items_in_loop(state: ExecutionState, iterable: AbstractValue, body: Sequence[ast.stmt]) -> list[AbstractValue]:
    """Returns the values of a loop variable: all values if their number depends on the ranks, otherwise one."""
    if iterable.is_known and isinstance(iterable.constant, range):
        if starts_processes(body):
            state.process_count = len(iterable.constant) if not iterable.facts else None
            number = state.identity.number_named("rank")
            return [number] if number else []
        if iterable.facts & {Fact.WORLD_RANGE} and len(iterable.constant) <= 8:
            return [known(number, iterable.facts & {Fact.RANK}) for number in iterable.constant]
    if iterable.items is not None and 0 < len(iterable.items) <= 4:
        return [either(iterable.items)]
    text = shortened(f"item of {iterable.text}")
    if iterable.called in ("enumerate", "zip") and iterable.arguments:
        parts = [either(items_in_loop(state, argument, body)) for argument in iterable.arguments]
        if iterable.called == "enumerate":
            parts = [AbstractValue("index", facts=frozenset({Fact.OPAQUE})), *parts[:1]]
        return [AbstractValue(text, items=parts)]
    facts = iterable.inherited() | {Fact.OPAQUE}
    if is_different_on_each_rank(iterable):
        facts |= {Fact.PER_RANK}
    return [AbstractValue(text, facts=facts, arguments=(iterable,))]


_MEANINGS: tuple[Callable[[LibraryCall], AbstractValue | None], ...] = (
    _builtin, communicate, start_processes, build_model, read_data, access_files, select_device, call_method,
)  # fmt: skip
