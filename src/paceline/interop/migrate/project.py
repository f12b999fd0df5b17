"""Reads, migrates and writes a program's files."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.interop.migrate.commands import migrate_commands
from paceline.interop.migrate.names import MigratedFile, MigrationFinding, MigrationMode, ModeChoice

if TYPE_CHECKING:
    from paceline.interop.migrate.python_source import PythonSource

_NO_PROGRAMS = {"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"}
_COMMANDS = {".bash", ".job", ".sbatch", ".sh", ".slurm", ".yaml", ".yml"}
_WORDS = ("torch", "horovod", "accelerate", "lightning", "deepspeed", "transformers")


class MissingLibCST(ImportError):
    """Raised if LibCST, the parser for Python files, is not installed."""


@dataclass(frozen=True)
class ProgramFile:
    """A file in the program, before and after the migration."""

    path: Path
    before: str
    after: MigratedFile

    @property
    def changes(self) -> bool:
        """Whether the migration changed the text."""
        return self.before != self.after.text


@dataclass
class MigratedProgram:
    """The results of migrating a program."""

    choice: ModeChoice
    files: list[ProgramFile] = field(default_factory=list)
    unread: list[tuple[Path, str]] = field(default_factory=list)  # files with syntax errors, and the error messages

    def places(self) -> list[MigrationFinding]:
        """Returns the findings in all files."""
        return [place for file in self.files for place in file.after.places]

    def write(self) -> int:
        """Writes the changed files; returns the number of files written."""
        changed = [file for file in self.files if file.changes]
        for file in changed:
            with file.path.open("w", encoding="utf-8", newline="") as opened:
                opened.write(file.after.text)
        return len(changed)


def migrate(paths: Sequence[Path], way: MigrationMode | None = None) -> MigratedProgram:
    """Migrates the program in these files and directories without writing any files.

    By default, the program's imports determine the migration mode `way`.
    """
    texts = {path: text for path in files_at(paths) if (text := _text(path)) is not None}
    scripts = {path: text for path, text in texts.items() if path.suffix == ".py"}
    worth = {path: text for path, text in scripts.items() if any(word in text for word in _WORDS)}
    readings, group_users, unread = _readings(worth)
    for path, _ in unread:
        del worth[path]
    choice = ModeChoice(way) if way is not None else _choice(readings, group_users, worth)
    program = MigratedProgram(choice, unread=unread)
    migrated: dict[Path, MigratedFile] = {}
    for path in readings:
        from paceline.interop.migrate.python_files import migrate_python

        migrated[path] = migrate_python(readings[path], program.choice.way)
    options = frozenset[str]().union(*(file.backend_options for file in migrated.values()))
    for path, text in texts.items():
        if path.suffix != ".py":
            migrated[path] = migrate_commands(text, options)
        if path in migrated and migrated[path].places:
            program.files.append(ProgramFile(path, text, migrated[path]))
    return program


def files_at(paths: Sequence[Path]) -> Iterator[Path]:
    """Yields the Python files, shell scripts, batch files, YAML files and Dockerfiles at these paths."""
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        if not path.is_dir():
            yield path
            continue
        for directory, below, names in os.walk(path):
            below[:] = sorted(name for name in below if _is_of_the_program(Path(directory, name)))
            yield from (found for name in sorted(names) if _is_kind(found := Path(directory, name)))


def _is_of_the_program(directory: Path) -> bool:
    is_hidden = directory.name.startswith(".") or directory.name in _NO_PROGRAMS
    return not is_hidden and not (directory / "pyvenv.cfg").exists()


def _is_kind(path: Path) -> bool:
    is_image = path.name.startswith(("Dockerfile", "Containerfile")) or path.suffix == ".dockerfile"
    return path.is_file() and (path.suffix == ".py" or path.suffix in _COMMANDS or is_image)


def _text(path: Path) -> str | None:
    """Reads a file with its original line endings; returns None for a binary file."""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            return file.read()
        except UnicodeDecodeError:
            return None


def _readings(
    texts: dict[Path, str],
) -> tuple[dict[Path, PythonSource], dict[str, tuple[int, str]], list[tuple[Path, str]]]:
    """Parses the Python files that may need migration.

    Returns the parsed files; for each other file that uses a library that relies on torch's default group, the line and
    the library; and the files with syntax errors.
    """
    if not texts:
        return {}, {}, []
    try:
        import libcst
    except ImportError:
        raise MissingLibCST(
            f"{next(iter(texts))} is read with LibCST, which is not installed: pip install 'paceline[migrate]'"
        ) from None
    from paceline.interop.migrate.python_files import summary_of
    from paceline.interop.migrate.python_source import read_source

    readings: dict[Path, PythonSource] = {}
    group_users: dict[str, tuple[int, str]] = {}
    unread: list[tuple[Path, str]] = []
    collects = gc.isenabled()
    gc.disable()  # parsing frees no objects, and garbage collection would slow it down by about 10%
    try:
        for path, text in texts.items():
            summary = summary_of(text)
            if summary.group_user is not None:
                group_users[str(path)] = summary.group_user
            if not summary.needs_migration:
                continue
            try:
                readings[path] = read_source(text)
            except libcst.ParserSyntaxError as error:
                unread.append((path, f"line {error.editor_line}: {error.message}"))
    finally:
        if collects:
            gc.enable()
    return readings, group_users, unread


def _choice(
    readings: dict[Path, PythonSource], group_users: dict[str, tuple[int, str]], texts: dict[Path, str]
) -> ModeChoice:
    """Returns the mode for these files, taking into account imported modules in the same directories."""
    if not texts:
        return ModeChoice(MigrationMode.IMPORT)
    from paceline.interop.migrate.python_files import choose_mode

    choice = choose_mode({str(path): reading for path, reading in readings.items()}, group_users)
    if choice.way is MigrationMode.PLUGIN:
        return choice
    for path in _modules_beside(texts, readings):
        if "torch.distributed" in (_text(path) or ""):
            reason = (
                f"{path} mentions torch.distributed and is not among the files to migrate; pass a folder that contains "
                "both"
            )
            return ModeChoice(MigrationMode.PLUGIN, reason)
    return choice


def _modules_beside(texts: dict[Path, str], readings: dict[Path, PythonSource]) -> Iterator[Path]:
    """Yields the modules that the files import from their own directories, excluding the files themselves."""
    from paceline.interop.migrate.python_files import imports_of

    known = {path.resolve() for path in texts}
    folders = {path.parent for path in texts}
    neighbors = {folder: _names_in(folder, known) for folder in folders}
    for path, text in texts.items():
        if not any(name in text for name in neighbors[path.parent]):
            continue  # skips most files; parsing all of them would dominate the run time
        names = [found.name for found in readings[path].imports] if path in readings else imports_of(text)
        for imported in names:
            parts = imported.split(".")
            for length in range(1, len(parts) + 1):
                module = path.parent.joinpath(*parts[:length]).with_suffix(".py")
                if module.is_file() and module.resolve() not in known:
                    yield module


def _names_in(folder: Path, known: set[Path]) -> set[str]:
    """Returns the names of the importable top-level modules in a directory, except `known`."""
    return {
        entry.stem if entry.suffix == ".py" else entry.name
        for entry in folder.iterdir()
        if entry.is_dir() or (entry.suffix == ".py" and entry.resolve() not in known)
    }
