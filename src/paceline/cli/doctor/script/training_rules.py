"""Rules about the data, models, checkpoints and devices in a script that trains on several ranks."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from paceline.cli.doctor import Diagnostic
from paceline.cli.doctor.script import library_call
from paceline.cli.doctor.script.trace import JobTrace, TraceEvent, first, found
from paceline.cli.doctor.script.value import AbstractValue, Fact

_LIBRARIES = (
    "torch",
    "torchvision",
    "torchaudio",
    "datasets",
    "sklearn",
    "numpy",
    "paceline",
    "TensorDataset",
    "Subset",
)
_STATE = re.compile(r"ckpt|checkpoint|model|resume|weight|state|snapshot|pretrain", re.I)


def _iterations(job: JobTrace, loader: AbstractValue) -> list[TraceEvent]:
    return [
        event for event in job.traces[0].of("iterate")
        if event.subject is not None and any(inner is loader for inner in library_call.loaders_in(event.subject))
    ]  # fmt: skip


def _trains(job: JobTrace, loader: AbstractValue) -> bool:
    loops = {event.node for event in _iterations(job, loader)}
    return any(loops & set(event.loops) for event in job.traces[0].of("backward"))


def _keyword(call: AbstractValue, name: str, position: int) -> AbstractValue | None:
    return call.keywords.get(name) or (call.arguments[position] if len(call.arguments) > position else None)


def loaders(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports loaders that read the entire dataset on every rank, or that read too many samples per step."""
    for ranks in job.by_node("loader"):
        event = first(ranks)
        loader = event.result
        if loader is None:
            continue
        sampler = library_call.sampler_of(loader)
        shuffle = _keyword(loader, "shuffle", 2)
        shuffles = shuffle is not None and shuffle.constant is True
        if sampler is None or sampler.is_none() is True:
            trains = _trains(job, loader)
            if (trains or shuffles) and not _is_divided(loader):
                iterations = _iterations(job, loader)
                evaluates = bool(iterations) and all(iteration.without_gradients for iteration in iterations)
                uncertain = loader.escaped or evaluates or not _is_familiar(loader) or job.uses_accelerator
                uncertain |= "**" in loader.keywords or (not iterations and _has_divided_twin(job, loader))
                reason = "every rank reads all of the data, so each sample is used once per rank in every epoch"
                fix = "pass sampler=DistributedSampler(dataset), and pass shuffle= to the sampler"
                confidence = job.confidence(event, unless=uncertain)
                yield found(event, "no-sampler", "DataLoader without a sampler", reason, fix, confidence)
        elif shuffles and sampler.is_none() is False:
            reason = "DataLoader does not accept both a sampler and shuffle=True"
            fix = "pass shuffle=True to the DistributedSampler"
            yield found(event, "shuffle", "shuffle=True with a sampler", reason, fix, job.confidence(event))
        batch_size = _keyword(loader, "batch_size", 1)
        if batch_size is not None and Fact.TIMES_WORLD_SIZE in batch_size.facts:
            reason = "batch_size is the number of samples per rank, so a step uses world-size times as many as intended"
            fix = "pass the batch size of one rank"
            uncertain = loader.escaped or sampler is None or sampler.called_name != "DistributedSampler"
            confidence = job.confidence(event, unless=uncertain)
            yield found(event, "batch-size", "batch_size multiplied by the world size", reason, fix, confidence)


def _has_divided_twin(job: JobTrace, loader: AbstractValue) -> bool:
    """Returns True if another loader of the same dataset has a sampler, in which case this loader may be unused."""
    data = _keyword(loader, "dataset", 0)
    others = [event.result for event in job.traces[0].of("loader") if event.result is not None]
    return any(library_call.sampler_of(other) is not None and _keyword(other, "dataset", 0) is data for other in others)


def _is_divided(loader: AbstractValue) -> bool:
    """Returns True if the dataset differs between the ranks."""
    data = _keyword(loader, "dataset", 0)
    if data is None:
        return True
    for part in data.sources():
        if (
            part.facts & {Fact.RANK, Fact.PERHAPS_RANK, Fact.PER_RANK}
            or "Iterable" in part.text
            or "Stream" in part.text
        ):
            return True
        if part.instance_of is not None and any("Iterable" in name for name in part.instance_of.base_names()):
            return True
    return any(value.facts & {Fact.RANK} for value in loader.keywords.values())


def _is_familiar(loader: AbstractValue) -> bool:
    """Returns False if an unknown function created the dataset and might have divided it, or if it has no samples."""
    data = _keyword(loader, "dataset", 0)
    if data is None or data.is_known:  # a constant, such as a range, takes the place of the samples
        return False
    for part in data.each():
        if part.called and part.instance_of is None and not part.called.startswith(_LIBRARIES):
            return False
    return True


def samplers(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports samplers that use the same order in every epoch, or that are used for the wrong purpose."""
    mentions_set_epoch = "set_epoch" in job.attributes
    optimizes = "step" in job.attributes
    events = {id(event.subject): event for event in job.traces[0].of("sampler")}
    loaders = [event.result for event in job.traces[0].of("loader") if event.result is not None]
    for identity, event in events.items():
        sampler = event.subject
        used = [
            other
            for other in loaders
            if (own := library_call.sampler_of(other)) and identity in map(id, own.sources(2))
        ]
        if sampler is None or not used:
            continue
        yield from _split(job, event, sampler)
        shuffle = _keyword(sampler, "shuffle", 3)
        shuffles = shuffle is None or shuffle.truth() is not False
        iterations = [iteration for loader in used for iteration in _iterations(job, loader)]
        training = [iteration for iteration in iterations if not iteration.without_gradients]
        trains = any(_trains(job, loader) for loader in used)
        escaped = sampler.escaped or any(loader.escaped for loader in used)
        repeated = any(len(event.loops) > 1 for event in training)
        if shuffles and repeated and "set_epoch" not in sampler.methods_called:
            evaluates = not trains and any(_trains(job, loader) for loader in loaders)
            evaluates |= not optimizes and re.search("eval|valid|val_|test", ast.unparse(event.node)) is not None
            reason = "the order depends on the seed and the epoch, so without it every epoch has the same order"
            fix = "call sampler.set_epoch(epoch) at the start of each epoch"
            confidence = job.confidence(event, unless=escaped or mentions_set_epoch or evaluates)
            yield found(event, "no-set-epoch", "DistributedSampler without set_epoch", reason, fix, confidence)
        for loader in used:
            yield from _evaluation(job, sampler, loader, shuffles)


def _split(job: JobTrace, event: TraceEvent, sampler: AbstractValue) -> Iterator[Diagnostic]:
    data = _keyword(sampler, "dataset", 0)
    for part in data.sources(2) if data is not None else ():
        if part.called_name == "random_split" and Fact.PER_RANK in part.facts:
            line = getattr(part.node, "lineno", 0)
            reason = (
                f"random_split() on line {line} draws different samples on every rank, because the seed depends on the"
                " rank; validation samples of one rank are in the training set of another"
            )
            fix = "pass generator=torch.Generator().manual_seed(0) to random_split()"
            confidence = job.confidence(event)
            yield found(event, "different-split", "a split that differs between the ranks", reason, fix, confidence)
            return


def _evaluation(job: JobTrace, sampler: AbstractValue, loader: AbstractValue, shuffles: bool) -> Iterator[Diagnostic]:
    own, other = _keyword(loader, "dataset", 0), _keyword(sampler, "dataset", 0)
    event = next(other for other in job.traces[0].of("loader") if other.result is loader)
    if own is not None and other is not None and own.text != other.text and not own.alternatives + other.alternatives:
        reason = f"the sampler was created for {other.text}, so its indices do not match {own.text}"
        fix = f"create a sampler for {own.text}"
        yield found(event, "other-sampler", "a sampler for another dataset", reason, fix, job.confidence(event))
        return
    iterations = _iterations(job, loader)
    if (
        shuffles
        and iterations
        and all(iteration.without_gradients for iteration in iterations)
        and not _trains(job, loader)
    ):
        reason = (
            "it repeats samples so that all ranks have the same number, and the repeated ones count twice in the result"
        )
        fix = "use paceline.DistributedEvalSampler, which assigns every sample to one rank"
        confidence = job.confidence(event, unless=loader.escaped or not _counts_samples(job, loader, iterations))
        yield found(event, "train-sampler", "an evaluation with a training sampler", reason, fix, confidence)


def _counts_samples(job: JobTrace, loader: AbstractValue, iterations: list[TraceEvent]) -> bool:
    """Returns True if the ranks sum their counts after the loop, and divide the sum by the size of the dataset."""
    data = _keyword(loader, "dataset", 0)
    events = job.traces[0].events
    after = events[events.index(iterations[0]) :]
    sums = [later for later in after if later.kind == "collective" and later.name in ("all_reduce", "reduce")]
    sizes = [later.subject.text for later in after if later.kind == "ratio" and later.subject is not None]
    is_sum = bool(sums) and iterations[0].node not in sums[0].loops
    return is_sum and data is not None and f"len({data.text})" in sizes


def models(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports models that are changed, used or saved in a way that is incompatible with their wrapper."""
    for ranks in job.by_node("change"):
        event = first(ranks)
        reason = "the wrapper averages only the gradients of the layers that existed when it was created"
        fix = "change the model first, then wrap it"
        yield found(event, "changed-after-wrap", f"{event.name} after wrapping", reason, fix, job.confidence(event))
    for ranks in job.by_node("backward"):
        event = first(ranks)
        facts = event.subject.facts if event.subject is not None else frozenset()
        if Fact.INNER_OUTPUT in facts and Fact.REPLICA_OUTPUT not in facts:
            reason = "the forward pass did not use the wrapper, so the gradients are not averaged"
            fix = "call the wrapped model instead of the module inside it"
            yield found(event, "not-wrapped", "backward() of the inner module", reason, fix, job.confidence(event))
    yield from _averages(job)
    yield from _never_wrapped(job)
    unwraps = "module" in job.attributes
    loads = [event for trace in job.traces for event in trace.of("load_state") if event.name == "wrapped"]
    for ranks in job.by_node("write"):
        event = first(ranks)
        if event.result is None:
            continue
        seen, fix = "the wrapper itself", "save model.module.state_dict()"
        reason = "a script without a process group cannot load the wrapper"
        wrapper = event.result
        if wrapper.called == "wrapped state" and wrapper.receiver is not None:
            wrapper, seen = wrapper.receiver, "state_dict() of the wrapper"
            reason = 'the names begin with "module.", so a model that is not wrapped cannot load them'
        perhaps_unwrapped = unwraps and event.result.is_alternative
        confidence = job.confidence(event, unless=bool(loads) or wrapper.escaped or perhaps_unwrapped)
        yield found(event, "wrapped-state-dict", seen, reason, fix, confidence)


def _averages(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports models whose gradients are never averaged, because `no_sync` surrounds every backward pass."""
    passes = [event for trace in job.traces for event in trace.of("backward")]
    event = next(iter(passes), None)
    if event is not None and all(call.name != "backward" for call in passes):
        reason = "no_sync() surrounds every backward pass, so the gradients are never averaged"
        fix = "exit no_sync() before the last backward pass that precedes optimizer.step()"
        reduces = any(call.name.startswith("all_reduce") for trace in job.traces for call in trace.of("collective"))
        confidence = job.confidence(
            event, unless=reduces or any(not condition.is_known for condition in event.conditions)
        )
        yield found(event, "never-averaged", "backward() in no_sync()", reason, fix, confidence)


_KNOWN_LIBRARIES = {
    "torch", "torchvision", "torchaudio", "numpy", "sklearn", "tqdm", "PIL", "matplotlib", "tensorboardX", "pandas",
    "yaml", "scipy",
}  # fmt: skip
_MAY_AVERAGE = re.compile(r"parallel|shard|reduce|gather|hook|average|sync|prepare|distributed_?optimizer", re.I)


def _never_wrapped(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports models that every rank trains on different samples without averaging the gradients."""
    events = [event for trace in job.traces for event in trace.of("wrap", "collective", "message", "rpc")]
    if not job.initializes_itself or any(event.name not in ("barrier", "broadcast") for event in events):
        return
    names = job.attributes | {node.id for node in ast.walk(job.tree) if isinstance(node, ast.Name)}
    modules = {alias.name for node in ast.walk(job.tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "." for node in ast.walk(job.tree) if isinstance(node, ast.ImportFrom)}
    roots = {module.partition(".")[0] for module in modules}
    if not roots <= _KNOWN_LIBRARIES | sys.stdlib_module_names or any(map(_MAY_AVERAGE.search, names)):
        return  # other code may average the gradients
    loops = {
        event.node for event in job.of(job.traces[0], "iterate") if event.subject is not None
        for loader in library_call.loaders_in(event.subject)
        if (sampler := library_call.sampler_of(loader)) is not None and sampler.called_name == "DistributedSampler"
    }  # fmt: skip
    for event in job.of(job.traces[0], "backward"):
        if loops & set(event.loops):
            reason = "every rank computes gradients from other samples and nothing averages them, so the models diverge"
            fix = "wrap the model: model = DistributedDataParallel(model)"
            yield found(event, "never-wrapped", "backward() of a model that is not wrapped", reason, fix,
                        job.confidence(event))  # fmt: skip
            return


def _uses_cpu_backend(job: JobTrace) -> bool:
    """Returns True if the script selects a CPU backend, which allows ranks to share a GPU."""
    backends = {event.subject.constant for event in job.of(job.traces[0], "init") if event.subject is not None}
    for node in ast.walk(job.tree):
        if isinstance(node, ast.Call) and library_call.qualified_name(node).endswith("add_argument"):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            values = [keyword.value for keyword in node.keywords if keyword.arg == "default"]
            if any("backend" in str(name) for name in names):
                backends |= {value.value for value in values if isinstance(value, ast.Constant)}
    return bool(backends & {"gloo", "mpi", "tcp"})


def checkpoints(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports checkpoints that are loaded onto the GPU from which they were saved."""
    on_gpus = any(True for trace in job.traces for _ in trace.of("device", "set_device"))
    restored, scheduled = [
        [
            source for trace in job.traces for event in trace.of("load_state")
            if event.result is not None and event.subject is not None
            if ("sched" in event.subject.text.lower()) is of_scheduler
            for source in event.result.sources() if source.called == "torch.load"
        ]
        for of_scheduler in (False, True)
    ]  # fmt: skip
    for ranks in job.by_node("load"):
        event = first(ranks)
        if not all(ranks) or event.result is None:
            continue
        if len({first.subject.text for events in ranks for first in events[:1] if first.subject is not None}) > 1:
            continue  # every rank loads the file that it has saved
        is_restored = any(other.node is event.node for other in restored)
        if not is_restored and any(other.node is event.node for other in scheduled):
            continue  # the state of a scheduler contains no tensors
        is_state = is_restored or (on_gpus and _STATE.search(ast.unparse(event.node)) is not None)
        on_cpus = not on_gpus and _uses_cpu_backend(job)
        in_memory = event.subject is not None and event.subject.called_name == "BytesIO"
        reason = "every rank loads the tensors onto the GPU from which they were saved, which may run out of memory"
        confidence = job.confidence(event, unless=not is_state or on_cpus or in_memory)
        fix = 'pass map_location="cpu"'
        yield found(event, "no-map-location", "torch.load without map_location", reason, fix, confidence)


def devices(job: JobTrace) -> Iterator[Diagnostic]:
    """Reports scripts that use the same GPU on every rank, or a GPU that the machine does not have."""
    selects = any(True for trace in [*job.traces, job.imported] for _ in trace.of("set_device", "visible_devices"))
    inits = list(job.of(job.traces[0], "init"))
    fixed_by_launcher = any(True for trace in job.traces for _ in trace.of("visible_devices"))
    selects |= any(event.name in ("imported", "Accelerator", "Fabric") for event in inits)
    uncertain = not job.initializes_itself
    on_one_machine = any(
        event.result is not None and event.result.is_known and event.result.constant != trace.rank
        for trace in job.traces for event in job.of(trace, "init")
    )  # fmt: skip
    places = [(first(ranks), _indices(ranks)) for ranks in job.by_node("device", "set_device")]
    fixed = {indices[0] for _, indices in places if indices and len(set(indices)) == 1}
    uncertain |= fixed_by_launcher or len(fixed - {"cuda"}) > 1  # several GPUs: the model may be divided among them
    reason = "every rank of the machine computes on the first GPU"
    fix = 'call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) at the start, and use the device "cuda"'
    reported: set[int] = set()
    for event, indices in places:
        if len(indices) < len(job.traces) or event.line in reported:
            continue
        ranks = list(range(len(job.traces)))
        seen = f"{event.name}({event.subject.text if event.subject else ''})"
        confidence = job.confidence(event, unless=uncertain)
        if len(set(indices)) == 1 and indices[0] != "cuda":
            yield found(event, "first-gpu", seen, reason.replace("first", "same"), fix, confidence)
        elif set(indices) == {"cuda"} and not selects:
            confidence = job.confidence(event, unless=uncertain or _uses_cpu_backend(job))
            yield found(event, "first-gpu", f"{event.name} without torch.cuda.set_device", reason, fix, confidence)
        elif indices == ranks and len(ranks) > job.local_size:
            reason = "ranks are numbered across all machines, so the second machine has no GPU with this number"
            local = 'use int(os.environ["LOCAL_RANK"])'
            others = any(len(set(place)) == job.local_size and place != indices for _, place in places)
            yield found(
                event, "rank-as-gpu", seen, reason, local, job.confidence(event, unless=not others or on_one_machine)
            )
        else:
            continue
        reported.add(event.line)
    used = False
    for event in job.traces[0].of("device", "set_device", "visible_devices"):
        if event.kind == "visible_devices" and used:
            reason = "the variable has no effect after the first use of a GPU"
            fix = "set it before the program starts, or use paceline run --virtual-local-rank"
            yield found(event, "late-visible-devices", "CUDA_VISIBLE_DEVICES", reason, fix, job.confidence(event))
        used |= event.kind != "visible_devices" and event.name != "torch.device"


def _indices(ranks: list[list[TraceEvent]]) -> list[object]:
    """Returns the GPU index used by each rank ("cuda" for the current GPU); ranks that use no GPU are omitted."""
    indices: list[object] = []
    for events in ranks:
        value = events[0].subject if events else None
        if len({other.subject.text for other in events if other.subject is not None}) > 1:
            return []  # every rank uses several GPUs
        constant = value.constant if value is not None and value.is_known else None
        if isinstance(constant, str) and re.fullmatch(r"cuda(:\d+)?", constant):
            indices.append(int(constant[5:]) if ":" in constant else "cuda")
        elif isinstance(constant, int) and not isinstance(constant, bool) and constant >= 0:
            indices.append(constant)
    return indices


RULES = (loaders, samplers, models, checkpoints, devices)
