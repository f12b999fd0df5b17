"""Rewrites a Python file. What the file imports decides: a name that is imported keeps its local name where it can.

A quick look at a Python file, to find out whether it has to be read in full.

LibCST takes a third of a second for a file of a thousand lines, and Python's own parser some milliseconds. Most files
of a program import torch and have nothing to migrate.

Decides by which way a program comes over, from all of its files: they share one process group.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping

import libcst as cst

from paceline.interop.migrate.call_rules import advice_for_call, apply_call_rules
from paceline.interop.migrate.names import (
    TELLING_WORDS,
    MigratedFile,
    MigrationFinding,
    MigrationMode,
    ModeChoice,
    group_user,
    is_in,
    is_migrated,
    needs_torchs_groups,
    new_name,
)
from paceline.interop.migrate.python_source import Edits, Imported, NameUse, PythonSource, expression, import_statement

_IMPORTS_US = re.compile(r"^[ \t]*(?:import|from)[ \t]+(?:torch\.distributed|horovod)\b", re.MULTILINE)


def may_need_migration(text: str) -> bool:
    """Returns whether anything in a file may concern the migration, or the way by which the program comes over.

    Names are followed without regard to scopes, so that the result is also true for some files in which nothing does,
    and for those that this Python cannot parse.
    """
    if not any(all(word in text for word in words) for words in TELLING_WORDS):
        return False
    if _IMPORTS_US.search(text):
        return True
    tree = _parsed(text)
    if tree is None:
        return True
    names: set[str] = set()
    meanings: dict[str, set[str]] = {}  # what the first word of a dotted name may stand for
    chains: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, local in _bindings(node):
                names.add(name)
                first = local.partition(".")[0]
                meanings.setdefault(first, set()).add(name if local == first else first)
        elif isinstance(node, (ast.Name, ast.Attribute)) and (chain := _chain(node)) is not None:
            chains.add(chain)
    names |= {root + rest for first, rest in chains for root in meanings.get(first, ())}
    return any(is_migrated(each) or advice_for_call(each) is not None or group_user(each) is not None for each in names)


def imports_of(text: str) -> Iterator[str]:
    """Yields the full names of all that a file imports; nothing if it cannot be parsed."""
    tree = _parsed(text)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (name for name, local in _bindings(node) if local != "*")


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes in the program
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _bindings(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yields the full name of each thing that is imported, and its name in the file, as `reading.bindings` does."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.name, alias.asname or alias.name
    elif not statement.level and statement.module is not None:
        for alias in statement.names:
            yield f"{statement.module}.{alias.name}", alias.asname or alias.name


def _chain(node: ast.expr) -> tuple[str, str] | None:
    """Returns the first word of a dotted name and the rest, with its dot; None for another expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return node.id, "".join(f".{part}" for part in reversed(parts))


def choose_mode(readings: Mapping[str, PythonSource]) -> ModeChoice:
    """Returns the way for a program of these files, by their names.

    What is built on torch's groups (FSDP, DTensor, torch's checkpoints, other libraries) needs torch's default group.
    The whole program then stays with torch.distributed and changes its backend.
    """
    for file, reading in sorted(readings.items()):
        for each in sorted(reading.concerning(), key=lambda each: each.line):
            if needs_torchs_groups(each.name):
                return ModeChoice(
                    MigrationMode.PLUGIN, f"{file}:{each.line} uses {each.name}, which is built on torch's groups"
                )
        for line, module in reading.stars:
            if needs_torchs_groups(f"{module}.*"):
                return ModeChoice(
                    MigrationMode.PLUGIN, f"{file}:{line} imports * from {module}, whose names are not known"
                )
        everything: list[Imported | NameUse] = [*reading.imports, *reading.uses]
        for found in everything:
            if (library := group_user(found.name)) is not None:
                return ModeChoice(
                    MigrationMode.PLUGIN, f"{file}:{found.line} uses {library}, which uses torch's default group"
                )
    return ModeChoice(MigrationMode.IMPORT)


_MODULES = ("paceline.parallel.hooks", "paceline.horovod", "paceline")  # those that a rewritten name may lie in
_OTHERS_OF_HOROVOD = "Paceline trains PyTorch programs, and this is for another library"
_ELASTIC = (
    "Horovod's elastic state has no counterpart of the same form; see paceline.ElasticState, which survives workers' "
    "deaths without going back to a commit"
)


def migrate_python(reading: PythonSource, way: MigrationMode) -> MigratedFile:
    """Returns the new text of a file that was read, and its places."""
    names = [*(each.name for each in reading.concerning()), *(module for _, module in reading.stars)]
    if not any(map(is_migrated, names)) and not any(advice_for_call(use.name) for use in reading.uses):
        return MigratedFile(reading.module.code)
    edits = Edits(reading.module)
    verdicts = apply_call_rules(reading, way, edits)
    table = _NameTable(way, verdicts.stay)
    places = [_import_place(reading, each, table, edits) for each in reading.imports if is_migrated(each.name)]
    for use in reading.uses:
        if use.node not in verdicts.reasons and (not is_migrated(use.name) or table.is_foreign(use)):
            continue  # the import of a part of Horovod that is not for PyTorch says it once for all of its names
        missing = _rewrite_use(use, table, edits)
        reason = verdicts.reasons.get(use.node, missing)
        if reason is not None:
            edits.comment(reading.statement_of(use.node), reason)
        places.append(MigrationFinding(use.line, use.name, reason, verdicts.notes.get(use.node)))
    _rewrite_imports(reading, table, edits)
    for line, module in reading.stars:
        if is_migrated(module):
            places.append(_star(reading, line, module, table, edits))
    return MigratedFile(edits.made(), tuple(sorted(places, key=lambda each: each.line)))


class _NameTable:
    """What names become in this file."""

    def __init__(self, way: MigrationMode, stay: set[str]) -> None:
        self.way = way
        self._stay = stay

    def new(self, name: str) -> str | None:
        return None if name in self._stay else new_name(name, self.way)

    def is_foreign(self, use: NameUse) -> bool:
        """Returns whether a use is of a part of Horovod for another library than PyTorch."""
        module = use.root if use.root is not None else ".".join(use.name.split(".")[:2])
        return is_in(module, "horovod") and self.new(module) is None

    def reason(self, name: str) -> str | None:
        """Returns why a name that concerns us has no counterpart, if that leaves something to do."""
        if self.new(name) is not None:
            return None
        if is_in(name, "horovod.torch.elastic"):
            return _ELASTIC
        if is_in(name, "horovod.torch"):
            return f"paceline.horovod has no {name[len('horovod.torch.') :]}"
        if self.way is MigrationMode.IMPORT and needs_torchs_groups(name):
            return f'Paceline has no {name}; with the backend "paceline" of torch.distributed it works (--way plugin)'
        return _OTHERS_OF_HOROVOD if is_in(name, "horovod") else None


def _import_place(reading: PythonSource, imported: Imported, table: _NameTable, edits: Edits) -> MigrationFinding:
    reason = table.reason(imported.name)
    if reason is not None:
        edits.comment(reading.statement_of(imported.statement), reason)
    return MigrationFinding(imported.line, f"import of {imported.name}", reason)


def _rewrite_use(use: NameUse, table: _NameTable, edits: Edits) -> str | None:
    """Rewrites a dotted name if its import does not do so; returns why not, if it has no counterpart."""
    new, root = table.new(use.name), None if use.root is None else table.new(use.root)
    if new is None and root is not None and not is_in(use.name, "horovod"):
        edits.expressions[use.node] = expression(use.name)  # the word that it begins with means Paceline from now on
        edits.modules.add("torch.distributed")
    if new is None:
        return table.reason(use.name)
    if new.endswith(".Backend.GLOO"):
        new = new.removesuffix("GLOO") + "PACELINE"
    first = use.written.partition(".")[0]
    written = first + new[len(root) :] if root is not None and is_in(new, root) else new
    if written == use.written:
        return None
    edits.expressions[use.node] = expression(written)
    if written == new:
        edits.modules.add(next(each for each in _MODULES if is_in(new, each)))
    return None


def _rewrite_imports(reading: PythonSource, table: _NameTable, edits: Edits) -> None:
    by_statement: dict[cst.CSTNode, list[Imported]] = {}
    for each in reading.imports:
        by_statement.setdefault(each.statement, []).append(each)
    for statement, group in by_statement.items():
        if not any(table.new(each.name) is not None for each in group):
            continue
        if isinstance(statement, cst.Import):
            edits.imports[statement] = _plain_imports(statement, group, table, reading)
        elif isinstance(statement, cst.ImportFrom):
            edits.imports[statement] = _from_imports(statement, group, table)


def _plain_imports(
    statement: cst.Import, group: list[Imported], table: _NameTable, reading: PythonSource
) -> list[cst.BaseSmallStatement]:
    """Returns what takes the place of `import a, b as c`."""
    kept = [each.alias for each in group if table.new(each.name) is None]
    result: list[cst.BaseSmallStatement] = []
    if kept:
        result.append(statement.with_changes(names=_closed(kept)))
    for each in group:
        new = table.new(each.name)
        if new is None:
            continue
        if each.alias.asname is not None or "." not in each.name:
            result.append(import_statement(new, each.local))
            continue
        root = each.name.partition(".")[0]  # `import torch.distributed` also gives the file `torch`
        is_bound = any(other is not each and other.local.partition(".")[0] == root for other in reading.imports)
        if root == "torch" and not is_bound:
            result.append(import_statement("torch"))
        result.append(import_statement(new))
    return result


def _from_imports(statement: cst.ImportFrom, group: list[Imported], table: _NameTable) -> list[cst.BaseSmallStatement]:
    """Returns what takes the place of `from a import b, c as d`."""
    kept = [each.alias for each in group if table.new(each.name) is None]
    result: list[cst.BaseSmallStatement] = []
    moved: dict[str, list[cst.ImportAlias]] = {}
    for each in group:
        new = table.new(each.name)
        if new is None:
            continue
        module, _, name = new.rpartition(".")
        if not module or new in _MODULES:
            result.append(import_statement(new, each.local))
        else:
            alias = each.alias if each.name.rpartition(".")[2] == name else _renamed(each, name)
            moved.setdefault(module, []).append(alias)
    for module, aliases in moved.items():
        is_whole = not kept and not result and len(moved) == 1
        names = list(statement.names) if is_whole and aliases == _aliases(statement) else _closed(aliases)  # type: ignore[arg-type]
        changed = statement.with_changes(module=_module(module), names=names)
        result.append(changed if is_whole else changed.with_changes(**_ON_ONE_LINE))
    if kept:
        result.insert(0, statement.with_changes(names=_closed(kept)))
    return result


_ON_ONE_LINE = {"lpar": None, "rpar": None}


def _aliases(statement: cst.ImportFrom) -> list[cst.ImportAlias]:
    return [] if isinstance(statement.names, cst.ImportStar) else list(statement.names)


def _renamed(imported: Imported, name: str) -> cst.ImportAlias:
    return cst.ImportAlias(cst.Name(name), cst.AsName(cst.Name(imported.local)))


def _module(name: str) -> cst.Attribute | cst.Name:
    node = expression(name)
    assert isinstance(node, cst.Attribute | cst.Name)
    return node


def _closed(aliases: list[cst.ImportAlias]) -> list[cst.ImportAlias]:
    """Returns the names with plain commas between them, and none after the last one."""
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    between = [each.with_changes(comma=comma) for each in aliases[:-1]]
    return [*between, aliases[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]


def _star(reading: PythonSource, line: int, module: str, table: _NameTable, edits: Edits) -> MigrationFinding:
    """Leaves `from module import *` as it is, unless the program keeps torch.distributed."""
    if table.way is MigrationMode.PLUGIN and is_in(module, "torch.distributed"):
        return MigrationFinding(line, f"import of {module}.*")
    reason = f"the names that come from {module} are not known here; import those that the file uses one by one"
    statement = next(
        (
            each
            for each in reading.module.body
            if isinstance(each, cst.SimpleStatementLine)
            and any(isinstance(one, cst.ImportFrom) and isinstance(one.names, cst.ImportStar) for one in each.body)
        ),
        None,
    )
    edits.comment(statement, reason)
    return MigrationFinding(line, f"import of {module}.*", reason)
