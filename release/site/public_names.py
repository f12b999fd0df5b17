"""The list of public names: `python release/site/public_names.py --write` updates docs/public-names.txt.

Names and signatures are read from the sources, without importing them. The mark of each name (stable, provisional or
torch's) is set manually in the list and preserved; a new name is marked as provisional. A test compares the list with
the sources to detect changes of public names. CONTRIBUTING.md defines the marks.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "docs" / "public-names.txt"
MODULES = {
    "paceline.functional": "collectives with gradients",
    "paceline.parallel.hooks": "communication hooks of DistributedDataParallel",
    "paceline.parallel.scatter_gather": "the parts of DataParallel: dividing and joining",
    "paceline.parallel.replicate": "the parts of DataParallel: copies of a module",
    "paceline.parallel.parallel_apply": "the parts of DataParallel: running the copies",
    "paceline.horovod": "Horovod's interface",
    "paceline.plugin": "the back end for torch.distributed",
    "paceline.integrations.lightning": "the strategies for Lightning and Fabric",
    "paceline.integrations.ray": "the trainer for Ray Train",
    "paceline.recordings": "reading recordings",
}
"""Public modules beyond the names of `paceline` itself."""

_ONLY = {
    "paceline.plugin": ["lend_default_group", "register"],
    "paceline.recordings": ["CallRecord", "NoRecordingError", "read", "read_aligned", "read_directory"],
}
"""The public names of modules that also contain names for internal use."""

STABLE, PROVISIONAL, TORCHS = "stable", "provisional", "torch's"
HEAD = """\
# The public names of Paceline with their signatures, read from the sources by release/site/public_names.py --write.
# stable: changes only with a warning for one minor release. provisional: may change in any minor release, and the
# changelog reports it. torch's: the object of PyTorch itself. CONTRIBUTING.md has the rules.
"""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


@cache
def tree_of(module: str) -> ast.Module:
    """Returns the parsed source of a module of the package."""
    path = ROOT / "src" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


@cache
def source_of(module: str) -> str:
    """Returns the module that a public module is an alias of, or the module itself."""
    for node in tree_of(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "sys.modules[__name__]":
            name = ast.unparse(node.value)
            return next(f"{origin}.{real}" for origin, real in _imports(module, name))
    return module


def _imports(module: str, name: str) -> Iterator[tuple[str, str]]:
    """Yields the module and the original name for each `from ... import` that defines `name` in `module`."""
    for node in _statements(tree_of(module).body):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, each.name) for each in node.names if (each.asname or each.name) == name)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements at the top of a module or class, including those inside `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _statements(node.body)


def _names_of(node: ast.stmt) -> list[str]:
    """Returns the names that a statement defines."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def find(module: str, name: str) -> tuple[str, Definition] | None:
    """Returns the module and the statement that define a name, following the imports of the given module."""
    found = None
    for node in _statements(tree_of(module).body):
        if name in _names_of(node):
            assert isinstance(node, Definition)
            found = module, node  # of several overloads, the last definition is the implementation
    if found is not None:
        return found
    for origin, real in _imports(module, name):
        if origin.split(".")[0] == "paceline":
            return find(origin, real)
    return None


def handed_on(module: str) -> list[tuple[str, str]]:
    """Returns the names that a module re-exports, each with the module that it is imported from."""
    imports = [node for node in tree_of(source_of(module)).body if isinstance(node, ast.ImportFrom)]
    return [(str(node.module), each.name) for node in imports for each in node.names if each.asname == each.name]


def names_in(module: str) -> list[str]:
    """Returns the public names of a module: those of `__all__`, or those that it defines or re-exports."""
    body = tree_of(module).body
    for node in body:
        if isinstance(node, ast.Assign) and "__all__" in _names_of(node) and isinstance(node.value, ast.List):
            return sorted(each.value for each in node.value.elts if isinstance(each, ast.Constant))
    defined = [
        name
        for node in body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        for name in _names_of(node)
    ]
    return sorted({name for name in [*defined, *(name for _, name in handed_on(module))] if not name.startswith("_")})


def described(module: str, name: str) -> list[str]:
    """Returns the lines for a name: its signature and, for a class, the signatures of its public members."""
    found = find(module, name)
    if found is None:
        return [name]
    where, node = found
    if isinstance(node, ast.ClassDef):
        members = _members(where, node)
        made = members.pop("__init__", "()")
        return [f"class {name}{made.removesuffix(' -> None')}", *(f"    {members[each]}" for each in sorted(members))]
    return [_signature(node, name, is_method=False)]


def _members(module: str, node: ast.ClassDef) -> dict[str, str]:
    """Returns the public members of a class with their signatures, including members of its bases in the package."""
    members: dict[str, str] = {}
    for base in reversed(node.bases):
        found = find(module, base.id) if isinstance(base, ast.Name) else None
        if found is not None and isinstance(found[1], ast.ClassDef):
            members |= _members(found[0], found[1])
    fields = []
    for each in _statements(node.body):
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if each.name == "__init__":
                members["__init__"] = _signature(each, "", is_method=True)
                members |= {name: line for name, line in _attributes(each) if name not in members}
            elif not each.name.startswith("_") and not ast.unparse(each).startswith(f"@{each.name}."):
                members[each.name] = _signature(each, each.name, is_method=True)
        elif isinstance(each, (ast.Assign, ast.AnnAssign)):
            for name in _names_of(each):
                fields.append(_field(each, name))
                if not name.startswith("_"):
                    members[name] = _signature(each, name, is_method=True)
    if any("dataclass" in ast.unparse(each) for each in node.decorator_list) and "__init__" not in members:
        members["__init__"] = f"({', '.join(fields)})"
    return members


def _attributes(init: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, str]]:
    """Yields the public attributes that a constructor sets, each with its line in the list."""
    for node in ast.walk(init):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and target.attr[0] != "_":
                annotation = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
                yield target.attr, target.attr + annotation


def _field(node: ast.Assign | ast.AnnAssign, name: str) -> str:
    """Returns a dataclass field formatted as a parameter."""
    annotation = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
    return f"{name}{annotation}{' = ...' if node.value is not None else ''}"


def _signature(node: Definition, name: str, *, is_method: bool) -> str:
    if isinstance(node, ast.AnnAssign):
        return f"{name}: {ast.unparse(node.annotation)}"
    if isinstance(node, (ast.Assign, ast.ClassDef)):
        is_alias = isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute))
        return f"{name} = {ast.unparse(node.value)}" if is_alias else name
    decorators = {ast.unparse(each) for each in node.decorator_list}
    returns = ast.unparse(node.returns) if node.returns else None
    if decorators & {"property", "cached_property", "functools.cached_property"}:
        return f"{name}: {returns}"
    arguments = node.args
    if is_method and "staticmethod" not in decorators:
        kind = arguments.posonlyargs or arguments.args
        arguments = ast.arguments(**{**dict(ast.iter_fields(arguments)), _kind_of(arguments): kind[1:]})
    prefix = next((f"{each} " for each in ("classmethod", "staticmethod") if each in decorators), "")
    return f"{prefix}{name}({ast.unparse(arguments)})" + (f" -> {returns}" if returns else "")


def _kind_of(arguments: ast.arguments) -> str:
    return "posonlyargs" if arguments.posonlyargs else "args"


def public_names() -> dict[str, list[tuple[str, str]]]:
    """Returns the public names of each public module, each with the module that defines it."""
    table = next(
        node.value
        for node in tree_of("paceline").body
        if isinstance(node, ast.Assign) and _names_of(node) == ["_PUBLIC"]
    )
    defined = [(name, module) for module, names in ast.literal_eval(table).items() for name in names]
    found = {"paceline": sorted(defined)}
    for module in MODULES:
        names = _ONLY.get(module) or names_in(source_of(module))
        found[module] = [(name, source_of(module)) for name in names]
    return found


def marks_in(text: str) -> dict[tuple[str, str], str]:
    """Returns the mark of each name in a list, by module and name."""
    marks, module = {}, ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"\[(.+)\]", line):
            module = heading[1]
        elif marked := re.match(rf"({STABLE}|{PROVISIONAL}|{TORCHS}) +(?:class )?(\w+)", line):
            marks[module, marked[2]] = marked[1]
    return marks


def text(marks: dict[tuple[str, str], str]) -> str:
    """Returns the text of the list with the given marks."""
    lines = [HEAD]
    for module, names in public_names().items():
        lines.append(f"[{module}]")
        for name, origin in names:
            if not origin.startswith("paceline"):
                lines.append(f"{TORCHS:<11}  {name}, of {origin}")
                continue
            first, *members = described(origin, name)
            lines.append(f"{marks.get((module, name), PROVISIONAL):<11}  {first}")
            lines += [f"{'':<11}  {member}" for member in members]
        lines.append("")
    return "\n".join(lines)


def differences() -> list[str]:
    """Returns the lines that differ between the list and the sources."""
    kept = LIST.read_text() if LIST.exists() else ""
    wanted = text(marks_in(kept))
    return list(difflib.unified_diff(kept.splitlines(), wanted.splitlines(), "docs/public-names.txt", "sources", n=0))


def main() -> int:
    """Compares or writes the list; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/public-names.txt")
    found = differences()
    if parser.parse_args().write:
        LIST.write_text(text(marks_in(LIST.read_text() if LIST.exists() else "")))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
