"""`ScriptSource`: properties of a worker's program that its source text shows before it runs.

The launcher uses them to choose how workers start. It parses the program and the modules beside it, and imports none.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.operate.launch.job import Command, CommandKind

_LIBRARIES = ("accelerate", "diffusers", "lightning", "peft", "pytorch_lightning", "timm", "transformers")
_IMPORT_TORCH = ("paceline", "torch", "torchaudio", "torchvision", *_LIBRARIES)
# Prefixes of variables that are read when torch and the libraries that it loads are imported.
_READ_AT_IMPORT = ("ATEN_", "BLIS_", "DNNL_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_")
_READ_BY_TORCH = ("PYTORCH_", "TORCH")
_MOST_FILES, _MOST_BYTES = 100, 2 << 20


@dataclass(frozen=True)
class ScriptSource:
    """Properties of a program and of the modules beside it.

    Attributes:
        imports_torch: whether it imports torch or a library that does.
        uses_optimizers: whether it mentions an optimizer, the first of which imports torch's compiler.
        uses_paceline: whether it mentions Paceline.
        sets_variables: whether it may set environment variables that torch reads when it is imported.
    """

    imports_torch: bool = False
    uses_optimizers: bool = False
    uses_paceline: bool = False
    sets_variables: bool = False

    @classmethod
    def of(cls, command: Command) -> ScriptSource | None:
        """Returns the properties of a command's program; None if it is not Python source that can be parsed here."""
        root, waiting = _first_file(command)
        if root is None or waiting is None:
            return None
        seen, files, size = cls(), {waiting}, 0
        queue = [waiting]
        while queue:
            file = queue.pop()
            try:
                text = file.read_bytes()
                size += len(text)
                tree = ast.parse(text)
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                return None
            imported = set(_imported(tree, file, root))
            seen = cls(
                imports_torch=seen.imports_torch or any(name.split(".")[0] in _IMPORT_TORCH for _, name in imported),
                uses_optimizers=seen.uses_optimizers or b"optim" in text,
                uses_paceline=seen.uses_paceline or b"paceline" in text,
                sets_variables=seen.sets_variables or any(map(_may_set, ast.walk(tree))),
            )
            found = {file for directory, name in imported for file in _files_of(directory, name)} - files
            files |= found
            queue += found
            if len(files) > _MOST_FILES or size > _MOST_BYTES:
                return None
        return seen


def _first_file(command: Command) -> tuple[Path | None, Path | None]:
    """Returns the directory from which the program's own modules are imported, and its file, if they are known."""
    program = command.argv[0]
    if command.kind is CommandKind.MODULE:
        root = Path(os.getcwd())
        base = root.joinpath(*program.split("."))
        files = (base.with_suffix(".py"), base / "__main__.py")
        return root, next((file for file in files if file.is_file()), None)
    path = Path(program)
    if command.kind is CommandKind.PROGRAM or path.suffix == ".pyc" or not path.is_file():
        return None, None
    return path.parent, path


def _imported(tree: ast.AST, file: Path, root: Path) -> Iterator[tuple[Path, str]]:
    """Yields the modules that a file imports, and names that may be modules, each as a directory and a dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((root, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            directory = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else root
            base = node.module or ""
            yield directory, base
            yield from ((directory, f"{base}.{alias.name}".lstrip(".")) for alias in node.names)


def _files_of(directory: Path, name: str) -> Iterator[Path]:
    """Yields the source files below a directory that an import of `name` runs."""
    parts = [part for part in name.split(".") if part]
    for count in range(1, len(parts) + 1):
        base = directory.joinpath(*parts[:count])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                yield file


def _may_set(node: ast.AST) -> bool:
    """Returns whether a node sets a variable that torch reads at its import, or one whose name is not constant."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        return any(isinstance(t, ast.Subscript) and _is_environ(t.value) and _matters(t.slice) for t in targets)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    function, owner = node.func.attr, node.func.value
    if function in ("putenv", "unsetenv"):
        return not node.args or _matters(node.args[0])
    if not _is_environ(owner):
        return False
    if function in ("setdefault", "pop"):
        return not node.args or _matters(node.args[0])
    if function == "update":
        keys = [key for value in node.args if isinstance(value, ast.Dict) for key in value.keys]
        are_known = all(isinstance(value, ast.Dict) for value in node.args)
        named = [keyword.arg for keyword in node.keywords]
        return not are_known or any(key is None or _matters(key) for key in keys) or any(map(_is_read, named))
    return function == "clear"


def _is_environ(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _matters(key: ast.AST) -> bool:
    return not isinstance(key, ast.Constant) or not isinstance(key.value, str) or _is_read(key.value)


def _is_read(name: str | None) -> bool:
    return name is None or name.startswith((*_READ_AT_IMPORT, *_READ_BY_TORCH))
