"""`ScriptSource`: properties of a worker's program, read from its source text before it runs.

The launcher uses these properties to decide how to start workers. The program and the modules in its directory are
parsed, but not imported.
"""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.operate.launch.job import Command, CommandKind

_LIBRARIES = ("accelerate", "diffusers", "lightning", "peft", "pytorch_lightning", "timm", "transformers")
_IMPORT_TORCH = ("paceline", "torch", "torchaudio", "torchvision", *_LIBRARIES)
# Modules that torch imports. After a fork, a file with the same name next to the script would be ignored.
_IMPORTED_BY_TORCH = (
    "filelock",
    "fsspec",
    "jinja2",
    "mpmath",
    "networkx",
    "numpy",
    "sympy",
    "tqdm",
    "typing_extensions",
)
# Variables that are not read while torch is imported.
_HARMLESS = (
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "TOKENIZERS_PARALLELISM", "WORLD_SIZE"),
)
_HARMLESS_PREFIXES = ("AWS_", "GLOO_", "HF_", "MLFLOW_", "NCCL_", "RAY_", "TRANSFORMERS_", "WANDB_")
_ENVIRONMENTS = ("environ", "environb")
_READING = ("copy", "get", "items", "keys", "values")
_UNSEEN = ("__import__", "exec", "import_module", "load_dotenv", "putenv", "unsetenv")
_MOST_FILES, _MOST_BYTES = 100, 2 << 20


@dataclass(frozen=True)
class ScriptSource:
    """Properties of a program and of the modules in its directory."""

    imports_torch: bool = False  # directly, or by importing a library that does
    uses_optimizers: bool = False  # a process's first optimizer imports torch's compiler
    uses_paceline: bool = False
    sets_variables: bool = False  # whether it might set variables that are read while torch is imported

    @classmethod
    def of(cls, command: Command) -> ScriptSource | None:
        """Returns the properties of a command's program.

        The result is None if this interpreter cannot parse the program as Python source, or if a module next to the
        program has the same name as a module that the standard library or torch imports.
        """
        root, queue = _first_files(command)
        if root is None or not queue:
            return None
        seen, files, size = cls(), set(queue), 0
        while queue:
            file = queue.pop()
            try:
                size += file.stat().st_size
                if size > _MOST_BYTES or len(files) > _MOST_FILES:
                    return None
                text = file.read_bytes()
                with warnings.catch_warnings():  # the worker shows these warnings
                    warnings.simplefilter("ignore")
                    tree = ast.parse(text)
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                return None
            imported = set(_imported(tree, file, root))
            seen = cls(
                imports_torch=seen.imports_torch or any(name.split(".")[0] in _IMPORT_TORCH for _, name in imported),
                uses_optimizers=seen.uses_optimizers or b"optim" in text,
                uses_paceline=seen.uses_paceline or b"paceline" in text,
                sets_variables=seen.sets_variables or _may_set_variables(tree),
            )
            found = {local for directory, name in imported for local in _files_of(directory, name)} - files
            if any(_shadows(local, root) for local in found):
                return None
            files |= found
            queue += found
        return seen


def _first_files(command: Command) -> tuple[Path | None, list[Path]]:
    """Returns the directory from which the program's own modules are imported, and the files that run first."""
    program = command.argv[0]
    if command.kind is CommandKind.MODULE:
        root = Path(os.getcwd())
        base = root.joinpath(*program.split("."))
        file = next((path for path in (base.with_suffix(".py"), base / "__main__.py") if _is_file(path)), None)
        return root, [] if file is None else [file, *_files_of(root, program)]
    if command.text_file is not None:
        return Path(os.getcwd()), [Path(command.text_file)]
    path = Path(program)
    if command.kind is CommandKind.PROGRAM or path.suffix == ".pyc" or not _is_file(path):
        return None, []
    return path.parent, [path]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # for example, a directory that only other users may read, or a name that is too long
        return False


def _shadows(file: Path, root: Path) -> bool:
    """Returns True if a module next to the program has the same name as a module imported before the fork."""
    module = file.relative_to(root).parts[0].removesuffix(".py") if file.is_relative_to(root) else ""
    return module in sys.stdlib_module_names or module in (*_IMPORT_TORCH, *_IMPORTED_BY_TORCH)


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
    """Yields the source files that are run when `name` is imported from a directory."""
    parts = [part for part in name.split(".") if part]
    for count in range(1, len(parts) + 1):
        base = directory.joinpath(*parts[:count])
        yield from (file for file in (base.with_suffix(".py"), base / "__init__.py") if _is_file(file))


def _may_set_variables(tree: ast.AST) -> bool:
    """Returns True if a module might set a variable that is not known to be harmless.

    This is assumed if the module uses the environment for anything but reading variables and setting harmless ones by
    name, or if it runs code that is not part of the source.
    """
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            if any(alias.asname and alias.name in (*_ENVIRONMENTS, *_UNSEEN) for alias in node.names):
                return True
        elif isinstance(node, (ast.Attribute, ast.Name)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in _UNSEEN or (name in _ENVIRONMENTS and not _is_harmless_use(node, parents)):
                return True
    return False


def _is_harmless_use(environment: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents[environment]
    match parent:
        case ast.Subscript(ctx=ast.Load()) | ast.Compare():
            return not isinstance(parents[parent], ast.AugAssign)
        case ast.Subscript(slice=key):
            return _is_harmless(key) and not isinstance(parents[parent], ast.AugAssign)
        case ast.Dict(keys=keys, values=values):  # {**os.environ}
            return any(key is None and value is environment for key, value in zip(keys, values, strict=True))
        case ast.keyword(arg="env"):  # environment of a subprocess
            return True
        case ast.Call(func=ast.Name(id="dict" | "len" | "sorted")):
            return True
        case ast.Attribute(attr=attribute):
            return attribute in _READING or _is_harmless_call(attribute, parents[parent])
    return False


def _is_harmless_call(method: str, call: ast.AST) -> bool:
    match call:
        case ast.Call(args=[key, *_]) if method in ("setdefault", "pop"):
            return _is_harmless(key)
        case ast.Call(args=arguments, keywords=keywords) if method == "update":
            dicts = [argument for argument in arguments if isinstance(argument, ast.Dict)]
            keys = [key for argument in dicts for key in argument.keys]
            names = [ast.Constant(keyword.arg) for keyword in keywords]
            return len(dicts) == len(arguments) and all(map(_is_harmless, [*keys, *names]))
    return False


def _is_harmless(key: ast.AST | None) -> bool:
    match key:
        case ast.Constant(value=str(name)):
            return name in _HARMLESS or name.startswith(_HARMLESS_PREFIXES)
    return False
