"""Static checks for common mistakes in training scripts."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from paceline.cli.doctor.command import Diagnostic, Severity

_COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "new_group",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "destroy_process_group",
}  # fmt: skip
_COMMUNICATORS = {"dist", "distributed", "paceline", "pl", "torch.distributed"}
_RANKS = {"rank", "global_rank", "local_rank", "world_rank", "RANK", "LOCAL_RANK", "node_rank"}
_RANK_CALLS = {"get_rank", "get_node_local_rank"}
_MAIN_CALLS = {"is_main_process", "is_master", "is_main", "is_rank_zero", "is_first_rank"}
_SAVES = {"torch.save", "save_pretrained", "save_model", "save_file"}


@dataclass
class _Script:
    """The script's syntax tree, with data that several rules use."""

    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    main_names: set[str] = field(default_factory=set)  # variables that are true on rank 0 only

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and _sides(node.value, set()) == (True, False):
                self.main_names |= {target.id for target in node.targets if isinstance(target, ast.Name)}

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Yields every call with its dotted name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield _name(node.func), node

    def rank_guard(self, node: ast.AST) -> tuple[ast.If, bool] | None:
        """Returns the innermost enclosing `if` that tests the rank, and whether only rank 0 reaches `node`."""
        child, parent = node, self.parents.get(node)
        while parent is not None and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if isinstance(parent, ast.If) and child is not parent.test:
                in_body, in_else = _sides(parent.test, self.main_names)
                if in_body or in_else:
                    return parent, in_body if child in parent.body else in_else
            child, parent = parent, self.parents.get(parent)
        return None

    def follows_an_early_return(self, node: ast.AST) -> bool:
        """Returns whether all ranks except rank 0 return before they reach `node`."""
        child, parent = node, self.parents.get(node)
        while parent is not None:
            for body in (getattr(parent, "body", None), getattr(parent, "orelse", None)):
                if not isinstance(body, list) or child not in body:
                    continue
                if any(map(self._returns_early, body[: body.index(child)])):
                    return True
            child, parent = parent, self.parents.get(parent)
        return False

    def _returns_early(self, statement: ast.stmt) -> bool:
        return (
            isinstance(statement, ast.If)
            and isinstance(statement.body[-1], (ast.Return, ast.Continue))
            and _sides(statement.test, self.main_names)[1]
        )


def _name(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "()")
    return ".".join(reversed(parts))


def _sides(test: ast.expr, main_names: set[str]) -> tuple[bool, bool]:
    """Returns a pair: whether only rank 0 runs the body of `if test`, and whether only rank 0 runs its else branch."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_sides(value, main_names)[0] for value in test.values), False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        if _is_rank(test.operand):
            return True, False
        body, orelse = _sides(test.operand, main_names)
        return orelse, body
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        sides = (test.left, test.comparators[0])
        is_zero = any(isinstance(side, ast.Constant) and side.value in (0, -1, "0") for side in sides)
        if any(map(_is_rank, sides)) and is_zero:
            if isinstance(test.ops[0], ast.Eq):
                return True, False
            if isinstance(test.ops[0], (ast.NotEq, ast.Gt)):
                return False, True
            if isinstance(test.ops[0], ast.In):
                return True, False
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.In) and _is_rank(test.left):
        return True, False  # rank in (0, -1)
    if isinstance(test, ast.Call) and _name(test.func).rpartition(".")[2] in _MAIN_CALLS:
        return True, False
    if isinstance(test, (ast.Name, ast.Attribute)):
        last = _name(test).rpartition(".")[2]
        return last in main_names or last in _MAIN_CALLS, False
    if _is_rank(test):
        return False, True  # if rank:
    return False, False


def _is_rank(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        last = _name(node.func).rpartition(".")[2]
        if last in _RANK_CALLS:
            return True
        if last in ("int", "get", "getenv"):  # int(os.environ.get("RANK", 0))
            return any(map(_is_rank, node.args))
        return False
    if isinstance(node, ast.Constant):
        return node.value in ("RANK", "LOCAL_RANK")
    if isinstance(node, ast.Subscript):
        return _is_rank(node.slice)
    return isinstance(node, (ast.Name, ast.Attribute)) and _name(node).rpartition(".")[2] in _RANKS


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _bad(node: ast.AST, about: str, seen: str, reason: str, fix: str, level: Severity = Severity.BAD) -> Diagnostic:
    return Diagnostic(level, about, seen, reason, fix, getattr(node, "lineno", 1))


def first_gpu(script: _Script) -> Iterator[Diagnostic]:
    """Reports scripts that use the same GPU on every rank."""
    sets_device = any(name.endswith("set_device") for name, _ in script.calls())
    why = "every rank of the machine computes on the first GPU"
    fix = 'call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) at the start, and use the device "cuda"'
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Constant) and node.value == "cuda:0":
            yield _bad(node, "first-gpu", '"cuda:0"', why, fix)
    for name, call in script.calls():
        last = name.rpartition(".")[2]
        first = call.args[0] if call.args else None
        is_zero = isinstance(first, ast.Constant) and first.value == 0 and first.value is not False
        if last in ("cuda", "set_device") and is_zero:
            yield _bad(call, "first-gpu", f"{last}(0)", why, fix)
        elif last == "cuda" and not call.args and not call.keywords and not sets_device:
            yield _bad(call, "first-gpu", ".cuda() without torch.cuda.set_device", why, fix)
        elif last in ("to", "device") and isinstance(first, ast.Constant) and first.value == "cuda" and not sets_device:
            yield _bad(call, "first-gpu", f'{last}("cuda") without torch.cuda.set_device', why, fix)


def samplers(script: _Script) -> Iterator[Diagnostic]:
    """Reports loaders that read the entire data set on every rank, or in the same order in every epoch."""
    makes_sampler = None
    for name, call in script.calls():
        last = name.rpartition(".")[2]
        if last == "DistributedSampler":
            makes_sampler = call
        if last != "DataLoader":
            continue
        sampler = _keyword(call, "sampler") or _keyword(call, "batch_sampler")
        if sampler is None and len(call.args) < 4:
            why = "every rank reads all of the data, so an epoch counts each sample once for every rank"
            fix = "pass sampler=DistributedSampler(dataset), and give shuffle= to the sampler"
            yield _bad(call, "no-sampler", "DataLoader without a sampler", why, fix)
        elif isinstance(shuffle := _keyword(call, "shuffle"), ast.Constant) and shuffle.value is True:
            why = "DataLoader refuses a sampler together with shuffle=True"
            yield _bad(
                call, "shuffle", "shuffle=True with a sampler", why, "pass shuffle=True to the DistributedSampler"
            )
    if makes_sampler is not None and not any(name.endswith("set_epoch") for name, _ in script.calls()):
        why = "the order depends on the seed and the epoch, so without it every epoch has the same order"
        fix = "call sampler.set_epoch(epoch) at the start of each epoch"
        yield _bad(makes_sampler, "no-set-epoch", "DistributedSampler without set_epoch", why, fix)


def collectives(script: _Script) -> Iterator[Diagnostic]:
    """Reports collectives in branches that only some ranks execute."""
    for name, call in script.calls():
        module, _, last = name.rpartition(".")
        if last not in _COLLECTIVES or (module and module not in _COMMUNICATORS):
            continue
        if not module and last in ("reduce", "gather", "scatter", "broadcast"):
            continue  # an unrelated function such as functools.reduce
        guard = script.rank_guard(call)
        if guard is not None:
            inside, is_main = guard
            other = inside.orelse if any(call in ast.walk(statement) for statement in inside.body) else inside.body
            nodes = (node for statement in other for node in ast.walk(statement))
            if any(isinstance(node, ast.Call) and _name(node.func).endswith(last) for node in nodes):
                continue  # both branches call the collective
            who = "only rank 0" if is_main else "every rank but 0"
            why = (
                f"{who} would reach this call (the if is on line {inside.lineno}), and would wait there for the others"
            )
            yield _bad(
                call, "not-all-ranks", f"{last}()", why, "move the call out of the if, so that all ranks make it"
            )
        elif script.follows_an_early_return(call):
            why = "the other ranks return before this call, and rank 0 waits for them in it"
            yield _bad(call, "not-all-ranks", f"{last}()", why, "make the call before the return")


def saves(script: _Script) -> Iterator[Diagnostic]:
    """Reports files that every rank writes under the same name."""
    for name, call in script.calls():
        last = name.rpartition(".")[2]
        if name not in _SAVES and last not in _SAVES - {"torch.save"}:
            continue
        guard = script.rank_guard(call)
        if (guard is None or not guard[1]) and not script.follows_an_early_return(call):
            path = call.args[1] if len(call.args) > 1 else call.args[0] if call.args else None
            if path is not None and any(_is_rank(node) for node in ast.walk(path) if isinstance(node, ast.expr)):
                continue  # the file name depends on the rank
            why = "all ranks write the same file at the same time, and the result may be damaged"
            fix = "write if dist.get_rank() == 0: before it, and call dist.barrier() before a rank reads the file"
            yield _bad(call, "all-ranks-save", f"{last}() on every rank", why, fix)


def loads(script: _Script) -> Iterator[Diagnostic]:
    """Reports checkpoints that are loaded onto the GPU from which they were saved."""
    for name, call in script.calls():
        if name == "torch.load" and _keyword(call, "map_location") is None and len(call.args) < 2:
            why = "every rank loads the tensors to the GPU that they were saved from, whose memory may not suffice"
            yield _bad(call, "no-map-location", "torch.load without map_location", why, 'pass map_location="cpu"')


RULES: tuple[Callable[[_Script], Iterator[Diagnostic]], ...] = (first_gpu, samplers, collectives, saves, loads)


def check_script(text: str) -> list[Diagnostic]:
    """Checks a script; returns the findings in line order.

    Raises:
        SyntaxError: the text is not valid Python.
    """
    script = _Script(ast.parse(text))
    return sorted((finding for rule in RULES for finding in rule(script)), key=lambda finding: finding.line or 0)
