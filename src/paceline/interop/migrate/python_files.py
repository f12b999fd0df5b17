"""Migration of Python files: detection, mode selection, and rewriting.

LibCST takes about 0.3 s to parse a thousand lines; Python's own parser takes a few milliseconds and is used to skip
the many files that need no migration. All files in a program use the same mode, because they share a process group.
Imports keep their local names where possible.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import libcst as cst

from paceline.interop.migrate.call_rules import ADVICE_FOR_CALLS, apply_call_rules
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
from paceline.interop.migrate.python_source import (
    Edits,
    ImportedName,
    NameUse,
    PythonSource,
    import_statement,
    syntax_tree,
)

_IMPORTS_US = re.compile(r"^[ \t]*(?:import|from)[ \t]+(?:torch\.distributed|horovod)\b", re.MULTILINE)
_MODULES = ("paceline.parallel.hooks", "paceline.horovod", "paceline")  # modules to which rewritten names refer
_OTHERS_OF_HOROVOD = "Paceline trains PyTorch programs, and this is for another library"
_ELASTIC = (
    "Horovod's elastic state has no direct equivalent; see paceline.ElasticState, which survives workers' deaths "
    "without returning to a commit"
)
_USES_GROUPS = "which uses torch's default group"
_ON_ONE_LINE = {"lpar": None, "rpar": None}


@dataclass(frozen=True)
class FileSummary:
    """Summary of a file for the migration.

    Attributes:
        needs_migration: True if the file may have to be rewritten, or cannot be parsed by this version of Python. The
            check ignores scopes.
        group_user: The line at which the file first uses a library that relies on torch's default group, and the
            library; None if it uses no such library.
    """

    needs_migration: bool
    group_user: tuple[int, str] | None = None


def summary_of(text: str) -> FileSummary:
    """Examines a file without LibCST."""
    if not any(all(word in text for word in words) for words in TELLING_WORDS):
        return FileSummary(False)
    if _IMPORTS_US.search(text):
        return FileSummary(True)
    tree = syntax_tree(text)
    if tree is None:
        return FileSummary(True)
    lines: dict[str, int] = {}  # first line of each qualified name
    meanings: dict[str, set[str]] = {}  # possible qualified names, by the first word of a dotted name
    chains: dict[tuple[str, str], int] = {}  # first line of each dotted name
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, local in _bindings(node):
                lines[name] = min(node.lineno, lines.get(name, node.lineno))
                first = local.partition(".")[0]
                meanings.setdefault(first, set()).add(name if local == first else first)
        elif isinstance(node, (ast.Name, ast.Attribute)) and (chain := _chain(node)) is not None:
            chains[chain] = min(node.lineno, chains.get(chain, node.lineno))
    for (first, rest), line in chains.items():
        for root in meanings.get(first, ()):
            lines.setdefault(root + rest, line)
    if any(is_migrated(name) or name in ADVICE_FOR_CALLS for name in lines):
        return FileSummary(True)
    users = [(line, library) for name, line in lines.items() if (library := group_user(name)) is not None]
    return FileSummary(False, min(users, default=None))


def imports_of(text: str) -> Iterator[str]:
    """Yields the qualified names of a file's imports, or nothing if the file cannot be parsed."""
    tree = syntax_tree(text)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (name for name, local in _bindings(node) if local != "*")


def _bindings(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yields the qualified name and the local name of each import, like `python_source.bindings` for LibCST's trees."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.name, alias.asname or alias.name
    elif not statement.level and statement.module is not None:
        for alias in statement.names:
            yield f"{statement.module}.{alias.name}", alias.asname or alias.name


def _chain(node: ast.expr) -> tuple[str, str] | None:
    """Splits a dotted name into its first word and the rest, including the dot. Returns None for other expressions."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return node.id, "".join(f".{part}" for part in reversed(parts))


def choose_mode(readings: Mapping[str, PythonSource], group_users: Mapping[str, tuple[int, str]]) -> ModeChoice:
    """Returns the mode for a program.

    FSDP, DTensor, torch's checkpoints and some libraries require torch's default group. A program that uses any of
    these keeps torch.distributed and changes only its backend. `group_users` contains the line and the library for each
    other file that uses such a library.
    """
    reasons = {file: f"{file}:{line} uses {library}, {_USES_GROUPS}" for file, (line, library) in group_users.items()}
    reasons |= {file: reason for file, reading in readings.items() if (reason := _reason_for_plugin(file, reading))}
    if not reasons:
        return ModeChoice(MigrationMode.IMPORT)
    return ModeChoice(MigrationMode.PLUGIN, reasons[min(reasons)])


def _reason_for_plugin(file: str, reading: PythonSource) -> str:
    for place in sorted(reading.concerning(), key=lambda place: place.line):
        if needs_torchs_groups(place.name):
            return f"{file}:{place.line} uses {place.name}, which is built on torch's groups"
    for line, module in reading.stars:
        if needs_torchs_groups(f"{module}.*"):
            return f"{file}:{line} imports * from {module}, whose names are not known"
    everything: list[ImportedName | NameUse] = [*reading.imports, *reading.uses]
    for found in everything:
        if (library := group_user(found.name)) is not None:
            return f"{file}:{found.line} uses {library}, {_USES_GROUPS}"
    return ""


def migrate_python(reading: PythonSource, way: MigrationMode) -> MigratedFile:
    """Returns the migrated text of a file and its findings."""
    names = [*(place.name for place in reading.concerning()), *(module for _, module in reading.stars)]
    if not any(map(is_migrated, names)) and not any(use.name in ADVICE_FOR_CALLS for use in reading.uses):
        return MigratedFile(reading.module.code)
    edits = Edits(reading.module)
    verdicts = apply_call_rules(reading, way, edits)
    table = _NameTable(way, verdicts.stay)
    places = [_import_place(reading, found, table, edits) for found in reading.imports if is_migrated(found.name)]
    for use in reading.uses:
        if use.node not in verdicts.reasons and (not is_migrated(use.name) or table.is_foreign(use)):
            continue  # parts of Horovod for other frameworks are reported only once, at the import
        missing = _rewrite_use(use, table, edits)
        reason = verdicts.reasons.get(use.node, missing)
        if reason is not None:
            edits.comment(reading.statement_of(use.node), reason)
        places.append(MigrationFinding(use.line, use.name, reason, verdicts.notes.get(use.node)))
    _rewrite_imports(reading, table, edits)
    for line, module in reading.stars:
        if is_migrated(module):
            places.append(_star(reading, line, module, table, edits))
    in_order = tuple(sorted(places, key=lambda place: place.line))
    return MigratedFile(edits.applied(), in_order, verdicts.backend_options)


class _NameTable:
    """The name replacements for one file."""

    def __init__(self, way: MigrationMode, stay: set[str]) -> None:
        self.way = way
        self._stay = stay

    def new(self, name: str) -> str | None:
        return None if name in self._stay else new_name(name, self.way)

    def is_foreign(self, use: NameUse) -> bool:
        """Returns True if a use refers to a part of Horovod for a framework other than PyTorch."""
        module = use.root if use.root is not None else ".".join(use.name.split(".")[:2])
        return is_in(module, "horovod") and self.new(module) is None

    def reason(self, name: str) -> str | None:
        """Returns the reason why a name without a counterpart requires manual changes, or None."""
        if self.new(name) is not None:
            return None
        if is_in(name, "horovod.torch.elastic"):
            return _ELASTIC
        if is_in(name, "horovod.torch"):
            return f"paceline.horovod has no {name[len('horovod.torch.') :]}"
        if self.way is MigrationMode.IMPORT and needs_torchs_groups(name):
            return f'Paceline has no {name}; with the backend "paceline" of torch.distributed it works (--way plugin)'
        return _OTHERS_OF_HOROVOD if is_in(name, "horovod") else None


def _import_place(reading: PythonSource, imported: ImportedName, table: _NameTable, edits: Edits) -> MigrationFinding:
    reason = table.reason(imported.name)
    if reason is not None:
        edits.comment(reading.statement_of(imported.statement), reason)
    return MigrationFinding(imported.line, f"import of {imported.name}", reason)


def _rewrite_use(use: NameUse, table: _NameTable, edits: Edits) -> str | None:
    """Rewrites a dotted name unless a new import suffices. Returns a reason if the name requires manual changes."""
    new, root = table.new(use.name), None if use.root is None else table.new(use.root)
    if new is None and root is not None and not is_in(use.name, "horovod"):
        edits.expressions[use.node] = cst.parse_expression(
            use.name
        )  # the migrated import binds the first word to Paceline
        edits.modules.add("torch.distributed")
    if new is None:
        return table.reason(use.name)
    if new.endswith(".Backend.GLOO"):
        new = new.removesuffix("GLOO") + "PACELINE"
    first = use.written.partition(".")[0]
    written = first + new[len(root) :] if root is not None and is_in(new, root) else new
    if written == use.written:
        return None
    edits.expressions[use.node] = cst.parse_expression(written)
    if written == new:
        edits.modules.add(next(module for module in _MODULES if is_in(new, module)))
    return None


def _rewrite_imports(reading: PythonSource, table: _NameTable, edits: Edits) -> None:
    by_statement: dict[cst.CSTNode, list[ImportedName]] = {}
    for found in reading.imports:
        by_statement.setdefault(found.statement, []).append(found)
    for statement, group in by_statement.items():
        if not any(table.new(found.name) is not None for found in group):
            continue
        if isinstance(statement, cst.Import):
            edits.imports[statement] = _plain_imports(statement, group, table, reading)
        elif isinstance(statement, cst.ImportFrom):
            edits.imports[statement] = _from_imports(statement, group, table)


def _plain_imports(
    statement: cst.Import, group: list[ImportedName], table: _NameTable, reading: PythonSource
) -> list[cst.BaseSmallStatement]:
    """Returns the replacement statements for `import a, b as c`."""
    kept = [found.alias for found in group if table.new(found.name) is None]
    result: list[cst.BaseSmallStatement] = []
    if kept:
        result.append(statement.with_changes(names=_closed(kept)))
    for found in group:
        new = table.new(found.name)
        if new is None:
            continue
        if found.alias.asname is not None or "." not in found.name:
            result.append(import_statement(new, found.local))
            continue
        root = found.name.partition(".")[0]  # `import torch.distributed` also binds `torch`
        is_bound = any(other is not found and other.local.partition(".")[0] == root for other in reading.imports)
        if root == "torch" and not is_bound:
            result.append(import_statement("torch"))
        result.append(import_statement(new))
    return result


def _from_imports(
    statement: cst.ImportFrom, group: list[ImportedName], table: _NameTable
) -> list[cst.BaseSmallStatement]:
    """Returns the replacement statements for `from a import b, c as d`."""
    kept = [found.alias for found in group if table.new(found.name) is None]
    result: list[cst.BaseSmallStatement] = []
    moved: dict[str, list[cst.ImportAlias]] = {}
    for found in group:
        new = table.new(found.name)
        if new is None:
            continue
        module, _, name = new.rpartition(".")
        if not module or new in _MODULES:
            result.append(import_statement(new, found.local))
        else:
            renamed = cst.ImportAlias(cst.Name(name), cst.AsName(cst.Name(found.local)))
            alias = found.alias if found.name.rpartition(".")[2] == name else renamed
            moved.setdefault(module, []).append(alias)
    for module, aliases in moved.items():
        is_whole = not kept and not result and len(moved) == 1
        names = list(statement.names) if is_whole and aliases == _aliases(statement) else _closed(aliases)  # type: ignore[arg-type]
        changed = statement.with_changes(module=_module(module), names=names)
        result.append(changed if is_whole else changed.with_changes(**_ON_ONE_LINE))
    if kept:
        result.insert(0, statement.with_changes(names=_closed(kept)))
    return result


def _aliases(statement: cst.ImportFrom) -> list[cst.ImportAlias]:
    return [] if isinstance(statement.names, cst.ImportStar) else list(statement.names)


def _module(name: str) -> cst.Attribute | cst.Name:
    node = cst.parse_expression(name)
    assert isinstance(node, cst.Attribute | cst.Name)
    return node


def _closed(aliases: list[cst.ImportAlias]) -> list[cst.ImportAlias]:
    """Returns the names separated by plain commas, without a trailing comma."""
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    between = [alias.with_changes(comma=comma) for alias in aliases[:-1]]
    return [*between, aliases[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]


def _star(reading: PythonSource, line: int, module: str, table: _NameTable, edits: Edits) -> MigrationFinding:
    """Reports `from module import *`, which needs manual changes unless the program keeps torch.distributed."""
    if table.way is MigrationMode.PLUGIN and is_in(module, "torch.distributed"):
        return MigrationFinding(line, f"import of {module}.*")
    reason = f"the names imported from {module} are not known here; import each name that the file uses"
    statement = next(
        (
            line
            for line in reading.module.body
            if isinstance(line, cst.SimpleStatementLine)
            and any(isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar) for node in line.body)
        ),
        None,
    )
    edits.comment(statement, reason)
    return MigrationFinding(line, f"import of {module}.*", reason)
