"""Rules for calls whose arguments mean something else to Paceline, or say what is still to be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import libcst as cst

from paceline.migrate import backends
from paceline.migrate.edits import Edits
from paceline.migrate.names import Way
from paceline.migrate.reading import Reading, Use, dotted

_MAKES_THE_GROUP = {"torch.distributed.init_process_group", "torch.distributed.distributed_c10d.init_process_group"}
_MAKES_A_GROUP = {"torch.distributed.new_group", "torch.distributed.distributed_c10d.new_group"}
_BACKEND_AT = {**dict.fromkeys(_MAKES_THE_GROUP, 0), **dict.fromkeys(_MAKES_A_GROUP, 2)}
_ON_OBJECTS = (
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list",
    "send_object_list",
)  # fmt: skip
_LIGHTNING = (
    'give it strategy=DDPStrategy(process_group_backend="paceline"), from lightning.pytorch.strategies or '
    "lightning.fabric.strategies"
)
_OWN_GROUP = (
    'it makes a group of gloo; on CPU call torch.distributed.init_process_group("paceline") first, and it uses that'
)

# What other libraries make a group by; their own arguments decide about the backend.
_REPORTED = {
    "accelerate.Accelerator": _OWN_GROUP,
    "accelerate.state.PartialState": _OWN_GROUP,
    "accelerate.PartialState": _OWN_GROUP,
    "transformers.Trainer": _OWN_GROUP,
    "transformers.Seq2SeqTrainer": _OWN_GROUP,
    "deepspeed.initialize": "DeepSpeed has backends of its own; paceline.ZeroRedundancyOptimizer has stages 1 to 3",
    "lightning.Trainer": _LIGHTNING,
    "lightning.pytorch.Trainer": _LIGHTNING,
    "pytorch_lightning.Trainer": _LIGHTNING,
    "lightning.Fabric": _LIGHTNING,
    "lightning.fabric.Fabric": _LIGHTNING,
    "lightning_fabric.Fabric": _LIGHTNING,
}


@dataclass
class Verdicts:
    """What the rules say: reasons and notes by the node of a use, and names whose imports stay."""

    reasons: dict[cst.CSTNode, str] = field(default_factory=dict)
    notes: dict[cst.CSTNode, str] = field(default_factory=dict)
    stay: set[str] = field(default_factory=set)


def reported(name: str) -> str | None:
    """Returns what to do about a call of another library; None if it is none that makes a group."""
    return _REPORTED.get(name)


def judge(reading: Reading, way: Way, edits: Edits) -> Verdicts:
    """Applies the rules to every call of a file: adds to the edits, and returns what is to be said."""
    verdicts = Verdicts()
    makes_the_group = [use for use in reading.uses if use.name in _MAKES_THE_GROUP]
    _backends(reading, way, edits, verdicts)
    for use in reading.uses:
        call = reading.calls.get(use.node)
        if call is None:
            continue
        last = use.name.rpartition(".")[2]
        if use.name in _MAKES_A_GROUP and way is Way.IMPORT:
            _keep_torchs_order(call, edits)
        elif use.name == "torch.multiprocessing.spawn" and way is Way.IMPORT:
            if _is_given(call, "join", 3):
                verdicts.stay.add(use.name)
                verdicts.reasons[use.node] = (
                    "paceline.spawn(..., join=False) returns an object with pids(), join() and end(), which has no "
                    "`processes`; use these, and write paceline.spawn here"
                )
        elif use.name.startswith("torch.distributed.") and last in _ON_OBJECTS and way is Way.IMPORT:
            verdicts.notes[use.node] = (
                "sends numbers, strings, containers, tensors and arrays; other types need allow_pickle=True"
            )
        elif (advice := reported(use.name)) is not None and not makes_the_group:
            verdicts.reasons[use.node] = advice
    return verdicts


def _backends(reading: Reading, way: Way, edits: Edits, verdicts: Verdicts) -> None:
    """Replaces gloo by Paceline in all calls that make groups, and where their arguments come from."""
    is_named = False
    sources: dict[cst.CSTNode, set[str]] = {}
    for use in reading.uses:
        call = reading.calls.get(use.node)
        if use.name not in _BACKEND_AT or call is None:
            continue
        backend = _argument(call, "backend", _BACKEND_AT[use.name])
        if backend is None:
            if way is Way.PLUGIN and use.name in _MAKES_THE_GROUP:
                _name_the_backend(reading, use, call, edits, verdicts)
            continue
        try:
            new = backends.replaced(backend, way)
        except backends.Mixture as mixture:
            verdicts.reasons[use.node] = (
                f'with PyTorch 2.14 or newer write "{str(mixture).replace("gloo", "paceline")}" here; older releases '
                'allow "paceline" alone, for CPU tensors'
            )
            continue
        has_options = _is_given(call, "pg_options", 7 if use.name in _MAKES_THE_GROUP else 3)
        if has_options and (new or way is Way.IMPORT):
            verdicts.reasons[use.node] = "Paceline's engines have no pg_options; leave them out"
        is_named = is_named or bool(new)
        edits.expressions |= new
        if names := backends.names_in(backend):
            sources[use.node] = names
    _variables(reading, way, edits, verdicts, sources, is_named)


def _variables(
    reading: Reading, way: Way, edits: Edits, verdicts: Verdicts, sources: dict[cst.CSTNode, set[str]], is_named: bool
) -> None:
    names = set[str]().union(*sources.values())
    try:
        elsewhere = backends.elsewhere(reading, names, way, is_named)
    except backends.Mixture:
        return
    edits.expressions |= elsewhere.found
    for node, origin in sources.items():
        if not elsewhere.shows_values:
            verdicts.notes[node] = (
                f'the backend comes from {", ".join(sorted(origin))}; for Paceline\'s engine it has to be "paceline"'
            )


def _name_the_backend(reading: Reading, use: Use, call: cst.Call, edits: Edits, verdicts: Verdicts) -> None:
    if any(arg.star for arg in call.args):
        verdicts.notes[use.node] = 'the arguments are not known here; the backend has to be "paceline"'
    elif "cuda" in reading.module.code:
        verdicts.reasons[use.node] = (
            'name the backend: "paceline" for CPU tensors, and with PyTorch 2.14 or newer "cpu:paceline,cuda:nccl" for '
            "both"
        )
    else:
        edits.arguments.setdefault(call, []).append(("backend", '"paceline"'))


def _keep_torchs_order(call: cst.Call, edits: Edits) -> None:
    """Has the ranks of a new group sorted, as torch always does, unless they are in order already."""
    ranks = _argument(call, "ranks", 0)
    if ranks is None or _is_given(call, "sort_ranks", 7) or any(arg.star for arg in call.args) or _is_sorted(ranks):
        return
    edits.arguments.setdefault(call, []).append(("sort_ranks", "True"))


def _is_sorted(ranks: cst.CSTNode) -> bool:
    if isinstance(ranks, cst.Call) and dotted(ranks.func) in ("list", "sorted") and ranks.args:
        return dotted(ranks.func) == "sorted" or _is_sorted(ranks.args[0].value)
    if isinstance(ranks, cst.Call):
        return dotted(ranks.func) == "range" and len(ranks.args) < 3
    if isinstance(ranks, cst.List | cst.Tuple):
        values = [each.value for each in ranks.elements]
        numbers = [int(each.value) for each in values if isinstance(each, cst.Integer) and each.value.isdecimal()]
        return len(values) < 2 or (len(numbers) == len(values) and numbers == sorted(numbers))
    return isinstance(ranks, cst.Name) and ranks.value == "None"


def _argument(call: cst.Call, keyword: str, at: int) -> cst.BaseExpression | None:
    """Returns an argument by its keyword or its position; None if the call has none."""
    positional: Sequence[cst.Arg] = [arg for arg in call.args if arg.keyword is None]
    named = next((arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == keyword), None)
    if named is None and len(positional) > at and not any(arg.star for arg in positional[: at + 1]):
        named = positional[at].value
    return None if isinstance(named, cst.Name) and named.value == "None" else named


def _is_given(call: cst.Call, keyword: str, at: int) -> bool:
    """Returns whether a call has an argument other than None or True."""
    value = _argument(call, keyword, at)
    return value is not None and not (isinstance(value, cst.Name) and value.value == "True")
