"""Rules for backend names, and for calls whose arguments differ in meaning or require manual changes.

The rules replace the backend name "gloo" with "paceline".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import libcst as cst

from paceline.interop.migrate.names import MigrationMode
from paceline.interop.migrate.python_source import Edits, NameUse, PythonSource, dotted

_GLOO, _OURS = "gloo", "paceline"
_DEFAULT_BACKEND = "get_default_backend_for_device"


class MixedBackendsError(ValueError):
    """Raised for a combination of backends. The plug-in supports combinations only with some releases of PyTorch."""


def replace_gloo(node: cst.CSTNode, way: MigrationMode) -> dict[cst.CSTNode, cst.BaseExpression]:
    """Returns the string nodes in an expression that specify the gloo backend, with their replacements.

    Raises a MixedBackendsError for a string with several backends if the program continues to use torch.distributed.
    """
    found: dict[cst.CSTNode, cst.BaseExpression] = {}
    for string in _strings(node):
        value = string.evaluated_value
        if not isinstance(value, str) or _GLOO not in value.lower():
            continue
        backends = [part.rpartition(":") for part in value.lower().split(",")]
        if not any(name == _GLOO for _, _, name in backends):
            continue
        if len({name for _, _, name in backends}) > 1 and way is MigrationMode.PLUGIN:
            raise MixedBackendsError(value)
        new = ",".join(device + colon + (_OURS if name == _GLOO else name) for device, colon, name in backends)
        found[string] = cst.SimpleString(f"{string.quote}{new}{string.quote}")
    return found


def variables_in(node: cst.CSTNode) -> set[str]:
    """Returns the variables and attributes in a backend expression, each without its qualifier."""
    if isinstance(node, cst.IfExp):
        return variables_in(node.body) | variables_in(node.orelse)
    name = dotted(node)
    return set() if name is None or ".Backend." in name else {name.rpartition(".")[2]}


class _Values(cst.CSTVisitor):
    """Finds gloo in assignments to the variables `names` and in comparisons with a backend.

    `shows_values` is True if the file assigns values to these variables, and `options` are the command-line options
    that supply them.
    """

    def __init__(self, reading: PythonSource, names: set[str], way: MigrationMode) -> None:
        super().__init__()
        self._names, self._way = names, way
        self.queries = {use.node for use in reading.uses if use.name.endswith(".get_backend")}
        self.found: dict[cst.CSTNode, cst.BaseExpression] = {}
        self.options: set[str] = set()
        self.has_gloo = self.shows_values = False

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802
        if any(self._is_one(target.target) for target in node.targets):
            self._take(node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:  # noqa: N802
        if self._is_one(node.target) and node.value is not None:
            self._take(node.value)

    def visit_Param(self, node: cst.Param) -> None:  # noqa: N802
        if self._is_one(node.name) and node.default is not None:
            self._take(node.default)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        if (dotted(node.func) or "").rpartition(".")[2] != "add_argument":
            return
        given = [arg.value for arg in node.args if arg.keyword is None or arg.keyword.value == "dest"]
        names = [str(value.evaluated_value) for value in given if isinstance(value, cst.SimpleString)]
        if any(name.lstrip("-").replace("-", "_") in self._names for name in names):
            self.options |= {name for name in names if name.startswith("-")}
            for arg in node.args:
                if arg.keyword is not None and arg.keyword.value in ("default", "choices"):
                    self._take(arg.value)

    def visit_Comparison(self, node: cst.Comparison) -> None:  # noqa: N802
        sides = [node.left, *(comparison.comparator for comparison in node.comparisons)]
        if any(self._is_one(side) or self._is_query(side) for side in sides):
            for side in sides:
                self.found |= replace_gloo(side, self._way)

    def _is_one(self, node: cst.CSTNode) -> bool:
        name = dotted(node)
        return name is not None and name.rpartition(".")[2] in self._names

    def _is_query(self, node: cst.CSTNode) -> bool:
        return isinstance(node, cst.Call) and node.func in self.queries

    def _take(self, value: cst.CSTNode) -> None:
        new = replace_gloo(value, self._way)
        self.found |= new
        self.has_gloo = self.has_gloo or bool(new)
        is_default = isinstance(value, cst.Call) and (dotted(value.func) or "").endswith(_DEFAULT_BACKEND)
        self.shows_values = self.shows_values or is_default or any(True for _ in _strings(value))


def _strings(node: cst.CSTNode) -> Iterator[cst.SimpleString]:
    if isinstance(node, cst.SimpleString):
        yield node
        return
    for child in node.children:
        yield from _strings(child)


_MAKES_THE_GROUP = {"torch.distributed.init_process_group", "torch.distributed.distributed_c10d.init_process_group"}
_MAKES_A_GROUP = {"torch.distributed.new_group", "torch.distributed.distributed_c10d.new_group"}
_BACKEND_AT = {**dict.fromkeys(_MAKES_THE_GROUP, 0), **dict.fromkeys(_MAKES_A_GROUP, 2)}
_ON_OBJECTS = (
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list",
    "send_object_list",
)  # fmt: skip
_LIGHTNING = (
    'pass strategy=DDPStrategy(process_group_backend="paceline"), from lightning.pytorch.strategies or '
    "lightning.fabric.strategies"
)
_OWN_GROUP = (
    'it creates a gloo group; on CPU call torch.distributed.init_process_group("paceline") first, so that it uses that '
    "group"
)

# Advice for functions in other libraries that create a group and select its backend with their own arguments.
ADVICE_FOR_CALLS = {
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
class CallRemarks:
    """The results of the rules, by the node at which a name is used."""

    reasons: dict[cst.CSTNode, str] = field(default_factory=dict)
    notes: dict[cst.CSTNode, str] = field(default_factory=dict)
    stay: set[str] = field(default_factory=set)  # imported names whose imports must not be rewritten
    backend_options: frozenset[str] = frozenset()  # see MigratedFile


def apply_call_rules(reading: PythonSource, way: MigrationMode, edits: Edits) -> CallRemarks:
    """Applies the rules to every call in a file: adds changes to `edits`, and returns remarks on calls."""
    verdicts = CallRemarks()
    makes_the_group = [use for use in reading.uses if use.name in _MAKES_THE_GROUP]
    _backends(reading, way, edits, verdicts)
    for use in reading.uses:
        call = reading.calls.get(use.node)
        if call is None:
            continue
        last = use.name.rpartition(".")[2]
        if use.name in _MAKES_A_GROUP and way is MigrationMode.IMPORT:
            _keep_torchs_order(call, edits)
        elif use.name == "torch.multiprocessing.spawn" and way is MigrationMode.IMPORT:
            if _is_given(call, "join", 3):
                verdicts.stay.add(use.name)
                verdicts.reasons[use.node] = (
                    "paceline.spawn(..., join=False) returns an object with pids(), join() and end(), which has no "
                    "`processes`; use these, and write paceline.spawn here"
                )
        elif use.name.startswith("torch.distributed.") and last in _ON_OBJECTS and way is MigrationMode.IMPORT:
            verdicts.notes[use.node] = (
                "sends numbers, strings, containers, tensors and arrays; other types need allow_pickle=True"
            )
        elif (advice := ADVICE_FOR_CALLS.get(use.name)) is not None and not makes_the_group:
            verdicts.reasons[use.node] = advice
    return verdicts


def _backends(reading: PythonSource, way: MigrationMode, edits: Edits, verdicts: CallRemarks) -> None:
    """Replaces gloo with Paceline in calls that create groups, and in assignments to variables passed to such calls."""
    is_named = False
    sources: dict[cst.CSTNode, set[str]] = {}
    for use in reading.uses:
        call = reading.calls.get(use.node)
        if use.name not in _BACKEND_AT or call is None:
            continue
        backend = _argument(call, "backend", _BACKEND_AT[use.name])
        if backend is None:
            if way is MigrationMode.PLUGIN and use.name in _MAKES_THE_GROUP:
                _name_the_backend(reading, use, call, edits, verdicts)
            continue
        try:
            new = replace_gloo(backend, way)
        except MixedBackendsError as mixture:
            verdicts.reasons[use.node] = (
                f'with PyTorch 2.14 or newer write "{str(mixture).replace("gloo", "paceline")}" here; older releases '
                'allow "paceline" alone, for CPU tensors'
            )
            continue
        has_options = _is_given(call, "pg_options", 7 if use.name in _MAKES_THE_GROUP else 3)
        if has_options and (new or way is MigrationMode.IMPORT):
            verdicts.reasons[use.node] = "Paceline's engines have no pg_options; leave them out"
        is_named = is_named or bool(new)
        edits.expressions |= new
        if names := variables_in(backend):
            sources[use.node] = names
    _variables(reading, way, edits, verdicts, sources, is_named)


def _variables(
    reading: PythonSource,
    way: MigrationMode,
    edits: Edits,
    verdicts: CallRemarks,
    sources: dict[cst.CSTNode, set[str]],
    is_named: bool,
) -> None:
    names = set[str]().union(*sources.values())
    elsewhere = _Values(reading, names, way)
    if names or elsewhere.queries:  # otherwise, the slow traversal of the file can be skipped
        try:
            reading.module.visit(elsewhere)
        except MixedBackendsError:
            return
    if elsewhere.has_gloo or is_named:
        edits.expressions |= elsewhere.found
    verdicts.backend_options = frozenset(elsewhere.options)
    for node, origin in sources.items():
        if not elsewhere.shows_values:
            verdicts.notes[node] = (
                f'the backend comes from {", ".join(sorted(origin))}; for Paceline\'s engine it has to be "paceline"'
            )


def _name_the_backend(reading: PythonSource, use: NameUse, call: cst.Call, edits: Edits, verdicts: CallRemarks) -> None:
    if any(arg.star for arg in call.args):
        verdicts.notes[use.node] = 'the arguments are not known here; the backend has to be "paceline"'
    elif "cuda" in reading.module.code:
        verdicts.reasons[use.node] = (
            'specify the backend: "paceline" for CPU tensors, and with PyTorch 2.14 or newer "cpu:paceline,cuda:nccl" '
            "for both"
        )
    else:
        edits.arguments.setdefault(call, []).append(("backend", '"paceline"'))


def _keep_torchs_order(call: cst.Call, edits: Edits) -> None:
    """Adds `sort_ranks=True` to a call to `new_group` with possibly unsorted ranks, because torch always sorts them."""
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
        values = [element.value for element in ranks.elements]
        numbers = [int(value.value) for value in values if isinstance(value, cst.Integer) and value.value.isdecimal()]
        return len(values) < 2 or (len(numbers) == len(values) and numbers == sorted(numbers))
    return isinstance(ranks, cst.Name) and ranks.value == "None"


def _argument(call: cst.Call, keyword: str, at: int) -> cst.BaseExpression | None:
    """Returns the argument with this keyword or position, or None if it is absent or is the constant None."""
    positional: Sequence[cst.Arg] = [arg for arg in call.args if arg.keyword is None]
    named = next((arg.value for arg in call.args if arg.keyword is not None and arg.keyword.value == keyword), None)
    if named is None and len(positional) > at and not any(arg.star for arg in positional[: at + 1]):
        named = positional[at].value
    return None if isinstance(named, cst.Name) and named.value == "None" else named


def _is_given(call: cst.Call, keyword: str, at: int) -> bool:
    """Returns True if the argument is present and is neither None nor True."""
    value = _argument(call, keyword, at)
    return value is not None and not (isinstance(value, cst.Name) and value.value == "True")
