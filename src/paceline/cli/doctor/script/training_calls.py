"""Semantics of calls that build models, read data, write files or select devices."""

from __future__ import annotations

import ast
import re
from contextlib import suppress

from paceline.cli.doctor.script.execution_state import ExecutionState
from paceline.cli.doctor.script.library_call import (
    LibraryCall,
    is_torch_module,
    is_work,
    is_world,
    output_of,
    qualified_name,
    wrapped_owner,
)
from paceline.cli.doctor.script.trace import ExecutionPath
from paceline.cli.doctor.script.value import AbstractValue, Fact, either, inherited_facts, known, shortened

WRAPPERS = {"DistributedDataParallel", "DDP"}
_SHARDING_WRAPPERS = {"FullyShardedDataParallel", "FSDP", "fully_shard", "SharedModelOptimizer", "LogicalShards"}
_SAME_OBJECT = {
    "to", "cuda", "cpu", "train", "eval", "float", "half", "double", "bfloat16", "requires_grad_", "share_memory",
    "contiguous", "detach_", "unwrap",
}  # fmt: skip
_PASS_THROUGH = {"compile", "script", "convert_sync_batchnorm", "set_model", "no_sync"}
_WRITERS = {  # function, and the position of its path argument
    "torch.save": 1, "numpy.save": 0, "np.save": 0, "numpy.savez": 0, "np.savez": 0, "numpy.savetxt": 0,
    "np.savetxt": 0, "safetensors.torch.save_file": 1, "torch.jit.save": 1, "torch.onnx.export": 2,
    "torchvision.utils.save_image": 1, "vutils.save_image": 1, "joblib.dump": 1, "shutil.copyfile": 1,
    "numpy.savez_compressed": 0, "np.savez_compressed": 0,
}  # fmt: skip
_WRITING_METHODS = {"save_pretrained", "savefig", "to_csv", "to_parquet", "to_json", "to_pickle"}
_OPEN = {"open", "io.open", "gzip.open"}
_DOWNLOADS = {"urlretrieve", "download_url", "download_and_extract_archive", "download_url_to_file"}
_COMMANDS = {"os.system", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
_READS = {"wait", "is_completed", "data_ptr", "size", "numel", "shape"}
"""Methods that do not use the values of a tensor."""
_TEXT_METHODS = {"lower", "upper", "strip", "format", "startswith"}


def note_assignment(path: ExecutionPath, owner: AbstractValue, value: AbstractValue, node: ast.expr) -> None:
    """Records an event if an assignment to an attribute or an item replaces a layer of a wrapped model."""
    for work in filter(is_work, value.sources(2)):
        work.escaped = True
    if is_torch_module(value) and wrapped_owner(owner) is not None:
        path.record("change", ast.unparse(node), node, owner)


def note_environment(
    path: ExecutionPath, owner: AbstractValue, key: AbstractValue, value: AbstractValue, node: ast.AST
) -> None:
    """Records an event if the script selects the visible GPUs, or sets the rank to a constant."""
    is_constant = value.is_known and not value.facts
    if owner.last_name == "environ" and key.constant in ("RANK", "LOCAL_RANK") and is_constant:
        path.record("init", "alone", node)
    if owner.last_name == "environ" and key.constant == "CUDA_VISIBLE_DEVICES":
        path.record("visible_devices", "CUDA_VISIBLE_DEVICES", node, value)


def note_use(path: ExecutionPath, value: AbstractValue, node: ast.AST) -> None:
    """Records an event if the script uses a tensor before an asynchronous call has completed."""
    work = value.pending
    if work is not None and not work.methods_called & {"wait", "is_completed", "synchronize"} and not work.escaped:
        path.record("race", value.text, node, work)
    value.pending = None


def narrow_wrapped(state: ExecutionState, test: ast.expr, outcome: bool) -> None:
    """Narrows a possibly wrapped model to the alternatives that a `hasattr` or `isinstance` test allows."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            narrow_wrapped(state, operand, not outcome)
        case ast.Call(func=ast.Name(id="hasattr"), args=[ast.Name() as model, ast.Constant(value="module")]):
            _keep(state, model.id, outcome)
        case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name() as model, kind]):
            if qualified_name(kind).rpartition(".")[2] in WRAPPERS:
                _keep(state, model.id, outcome)


def _keep(state: ExecutionState, model: str, is_wrapped: bool) -> None:
    kept = [
        alternative for alternative in state.lookup(model).alternatives if (alternative.wraps is not None) is is_wrapped
    ]
    if kept:
        state.assign(model, either(kept))


def build_model(call: LibraryCall) -> AbstractValue | None:
    """Interprets calls that wrap, convert or copy a model."""
    module = call.argument(0, "module")
    if module is None:
        return None
    if call.name in WRAPPERS | _SHARDING_WRAPPERS:
        return _wrap(call, module)
    if call.name == "convert_sync_batchnorm":
        if any(alternative.wraps is not None for alternative in module.each()):
            call.record("change", "convert_sync_batchnorm(...)", module)
        return module
    if call.name in _PASS_THROUGH and call.callee.is_module:
        return module
    if call.name == "deepcopy":
        return AbstractValue(f"copy of {module.text}", wraps=module.wraps, instance_of=module.instance_of)
    return None


def _wrap(call: LibraryCall, module: AbstractValue) -> AbstractValue:
    inner = module.wraps or module
    wrapper = call.object(wraps=inner, called="wrapping" if call.name in WRAPPERS else "sharding", arguments=())
    if call.name in WRAPPERS:
        for alternative in inner.each():
            alternative.wrapper = wrapper
    call.record("wrap", call.name, module, wrapper)
    group = call.keywords.get("process_group") or call.keywords.get("device_mesh")
    call.record("collective", call.name, in_group=group is not None and not is_world(group))
    devices = call.argument(1, "device_ids")
    for device in devices.items or () if devices is not None else ():
        call.record("device", "device_ids", device)
    return wrapper


def read_data(call: LibraryCall) -> AbstractValue | None:
    """Interprets calls that create loaders or download files."""
    if call.name in ("DataLoader", "DistributedSampler"):
        value = call.object()
        call.record("loader" if call.name == "DataLoader" else "sampler", call.name, value, value)
        return value
    download = call.keywords.get("download")
    if call.name in _DOWNLOADS or call.path in ("wget.download", "gdown.download"):
        call.record("download", call.name, call.argument(1, "filename", "root"))
    elif download is not None and download.constant is True and call.name[:1].isupper():
        call.record("download", call.name, call.argument(0, "root"))
    elif call.path in _COMMANDS and call.arguments:
        command = call.arguments[0]
        words = [str(part.constant) for part in [command, *(command.items or ())] if part.is_known]
        if any(re.match(r"(wget|curl)\b", word) for word in words):
            call.record("download", call.name, command)
    return None


def access_files(call: LibraryCall) -> AbstractValue | None:
    """Interprets calls that write or create files, or load checkpoints."""
    if call.name == "open":
        return _open(call)
    if call.path == "torch.load":
        return _load(call)
    if call.path == "logging.basicConfig" and "filename" in call.keywords:
        mode = call.keywords.get("filemode")
        name = f'basicConfig(filemode="{mode.constant if mode is not None else "a"}")'
        call.record("write", name, call.keywords["filename"])
    path = _written_path(call)
    if path is not None:
        parts = (element for value in call.arguments for element in value.contents())
        states = (part for part in parts if part.called in ("wrapped state", "wrapping"))
        exports = call.path == "torch.onnx.export"  # the computation, without the wrapper
        call.record("write", f"{call.name}()", path, None if exports else next(states, None))
        return known(None)
    is_path_method = call.name == "mkdir" and call.callee.receiver is not None and not call.callee.is_module
    if call.path in ("os.mkdir", "os.makedirs") or is_path_method:
        exists = call.keywords.get("exist_ok")
        if exists is None or exists.truth() is False:
            directory = call.callee.receiver if is_path_method else call.argument(0, "path", "name")
            call.record("directory", f"{call.name}()", directory)
    return None


def _open(call: LibraryCall) -> AbstractValue | None:
    is_method = call.path not in _OPEN
    path = call.callee.receiver if is_method else call.argument(0, "file")
    mode = call.argument(0 if is_method else 1, "mode")
    if path is None or mode is None or not isinstance(mode.constant, str) or not set("wxa") & set(mode.constant):
        return None
    if is_method and not re.search("path|file|dir", path.text, re.I):
        return None  # an unrelated method, such as an image's `save`
    call.record("write", f'open(..., "{mode.constant}")', path)
    return AbstractValue(f"file {path.text}", called="open", arguments=(path,), facts=path.inherited())


def _load(call: LibraryCall) -> AbstractValue:
    path, location = call.argument(0, "f"), call.argument(1, "map_location")
    text = shortened(f"torch.load({path.text if path is not None else ''})")
    result = AbstractValue(text, called="torch.load", arguments=tuple(call.arguments[:1]), node=call.node)
    if location is None or location.is_none() is True:
        call.record("load", call.name, path, result)
    elif isinstance(location.constant, str):
        call.record("device", "map_location", location)
    return result


def _written_path(call: LibraryCall) -> AbstractValue | None:
    """Returns the path of the file that the call writes, or None."""
    position = _WRITERS.get(call.path, 1 if call.name == "save_file" else None)
    if position is not None:
        return call.argument(position, "f", "file", "filename", "path")
    leaves_it_to_a_function = not call.keywords.keys().isdisjoint({"is_main_process", "save_function"})
    if call.name in _WRITING_METHODS and call.callee.receiver is not None and not leaves_it_to_a_function:
        return call.argument(0, "path", "save_directory")
    return call.callee.receiver if call.name in ("write_text", "write_bytes") else None


def select_device(call: LibraryCall) -> AbstractValue | None:
    """Interprets calls that select or use a GPU."""
    first = call.argument(0, "device")
    if call.path.endswith(("cuda.set_device", "accelerator.set_device_index")) or call.path == "torch.cuda.device":
        call.record("set_device", call.name, first)
        return None
    if call.path.endswith("cuda.device_count") or call.path == "torch.accelerator.device_count":
        return call.state.identity.number_named("device_count")
    if call.path in ("torch.device", "device") and first is not None:
        device = _device(first, call.argument(1, "index"))
        call.record("device", "torch.device", device)
        device.called = "torch.device"
        return device
    is_method = call.callee.receiver is not None and not call.callee.is_module
    if call.name == "cuda" and is_method:
        call.record("device", ".cuda", first or known("cuda"))
        return call.callee.receiver
    target = first if call.name == "to" and is_method else call.keywords.get("device")
    for alternative in target.each() if target is not None else ():
        is_literal = isinstance(alternative.constant, (str, int)) and not isinstance(alternative.constant, bool)
        if is_literal and alternative.called != "torch.device":
            call.record("device", f".{call.name}", alternative)
    return None


def _device(kind: AbstractValue, index: AbstractValue | None) -> AbstractValue:
    if kind.alternatives:
        return either(_device(alternative, index) for alternative in kind.alternatives)
    if index is None:
        return AbstractValue(kind.text, kind.constant, kind.facts)
    facts = inherited_facts([kind, index])
    if kind.is_known and index.is_known:
        return known(f"{kind.constant}:{index.constant}", facts)
    return AbstractValue(f"{kind.text}:{index.text}", facts=facts)


def call_method(call: LibraryCall) -> AbstractValue | None:
    """Interprets forward and backward passes, and methods of models, tensors, lists and strings."""
    owner = call.callee.receiver
    if call.callee.wraps is not None or call.callee.wrapper is not None:
        return _forward(call)
    if call.name == "backward":
        loss = owner if owner is not None and owner.inherited() else call.argument(0) or owner
        skips = call.state.path.without_averages > 0
        call.record("backward", "backward in no_sync" if skips else call.name, loss)
        if loss is not None and Fact.REPLICA_OUTPUT in loss.facts and not skips:
            call.record("collective", call.name)  # the gradients are averaged
        return known(None)
    if owner is None or call.callee.is_module:
        return None
    owner.methods_called.add(call.name)
    if call.name not in _READS:
        note_use(call.state.path, owner, call.node)
    if call.name in ("wait", "synchronize", "result"):
        for work in filter(is_work, owner.sources()):
            work.methods_called.add("wait")
    if call.name in ("append", "add", "extend", "insert", "put") and owner.items is not None and call.arguments:
        owner.items.append(call.arguments[-1])
        return known(None)
    if call.name == "update" and (call.keywords or any(argument.entries() for argument in call.arguments)):
        for argument in [*(value.entries() for value in call.arguments), call.keywords]:
            for name, value in argument.items():
                call.state.store(owner.attributes, f"['{name}']", value)
        return known(None)
    if call.name in ("add_module", "register_module", "register_parameter") and wrapped_owner(owner) is not None:
        call.record("change", f"{call.name}()", owner)
    if call.name == "state_dict" and owner.wraps is not None:
        called = "wrapped state" if owner.called == "wrapping" else "sharded state"
        if owner.called == "sharding" and owner.text.startswith(("FullyShardedDataParallel", "FSDP")):
            call.record("collective", call.name)  # gathers the parameters
        conditions = call.state.path.conditions
        several = bool(conditions) and conditions[-1].node is call.node
        return AbstractValue(f"{owner.text}.state_dict()", called=called, receiver=owner, is_alternative=several)
    if call.name == "load_state_dict":
        is_wrapped = any(alternative.wraps is not None for alternative in owner.each())
        call.record("load_state", "wrapped" if is_wrapped else "plain", owner, call.argument(0, "state_dict"))
    if call.name in ("eval", "train") and not call.arguments:
        call.state.path.evaluates = call.name == "eval"
    if call.name in _SAME_OBJECT:
        return owner
    if (
        isinstance(owner.constant, str)
        and call.name in _TEXT_METHODS
        and all(argument.is_known for argument in call.arguments)
    ):
        with suppress(Exception):
            result = getattr(owner.constant, call.name)(*(argument.constant for argument in call.arguments))
            return known(result, inherited_facts([owner, *call.arguments]))
    return None


def _forward(call: LibraryCall) -> AbstractValue:
    model = call.callee
    result = AbstractValue(call.path)
    for inner in model.wraps.each() if model.wraps is not None else ():
        if inner.instance_of is not None:
            result = call.run(inner, call.arguments, call.keywords)
    result.facts -= {Fact.INNER_OUTPUT}
    return output_of(model, result, call.arguments)
