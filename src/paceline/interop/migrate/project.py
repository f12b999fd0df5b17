"""Finds the files of a program, migrates them together, and writes them back."""

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
    """LibCST, with which Python files are read, is not installed."""


@dataclass(frozen=True)
class ProgramFile:
    """A file of the program: its text, and what becomes of it."""

    path: Path
    before: str
    after: MigratedFile

    @property
    def changes(self) -> bool:
        """Whether its text changes."""
        return self.before != self.after.text


@dataclass
class MigratedProgram:
    """A program after its migration, which `write` puts on the disk."""

    choice: ModeChoice
    files: list[ProgramFile] = field(default_factory=list)
    unread: list[tuple[Path, str]] = field(default_factory=list)  # files that are no Python, and why

    def places(self) -> list[MigrationFinding]:
        """Returns the places of all files."""
        return [place for file in self.files for place in file.after.places]

    def write(self) -> int:
        """Writes the files that change; returns how many they are.

        Raises:
            OSError: a file cannot be written.
        """
        changed = [file for file in self.files if file.changes]
        for file in changed:
            with file.path.open("w", encoding="utf-8", newline="") as opened:
                opened.write(file.after.text)
        return len(changed)


def migrate(paths: Sequence[Path], way: MigrationMode | None = None) -> MigratedProgram:
    """Returns what becomes of the files at `paths`, which are files or folders of one program. Nothing is written.

    Args:
        paths: the program's files, or the folders that hold them.
        way: how it is to come over; by default its imports decide.

    Raises:
        FileNotFoundError: there is nothing at one of the paths.
        MissingLibCST: there are Python files to read, and LibCST is not installed.
    """
    texts = {path: text for path in files_at(paths) if (text := _text(path)) is not None}
    scripts = {path: text for path, text in texts.items() if path.suffix == ".py"}
    worth = {path: text for path, text in scripts.items() if _is_worth_reading(text)}
    readings, unread = _readings(worth)
    for path, _ in unread:
        del worth[path]
    program = MigratedProgram(ModeChoice(way) if way is not None else _choice(readings, worth), unread=unread)
    for path, text in texts.items():
        if path in readings:
            from paceline.interop.migrate.python_files import migrate_python

            migrated = migrate_python(readings[path], program.choice.way)
        elif path.suffix != ".py":
            migrated = migrate_commands(text)
        else:
            continue
        if migrated.places:
            program.files.append(ProgramFile(path, text, migrated))
    return program


def files_at(paths: Sequence[Path]) -> Iterator[Path]:
    """Yields the files that a program may consist of: Python, shell scripts, batch files, YAML and Dockerfiles.

    Raises:
        FileNotFoundError: there is nothing at one of the paths.
    """
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}")
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
    """Returns the file's text with its ends of lines as they are; None if it is no text."""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            return file.read()
        except UnicodeDecodeError:
            return None


def _is_worth_reading(text: str) -> bool:
    return any(word in text for word in _WORDS)


def _readings(texts: dict[Path, str]) -> tuple[dict[Path, PythonSource], list[tuple[Path, str]]]:
    """Returns the Python files that may concern the migration as they were read, and those of them that cannot be."""
    if not texts:
        return {}, []
    try:
        import libcst
    except ImportError:
        raise MissingLibCST(
            f"{next(iter(texts))} is read with LibCST, which is not installed: pip install 'paceline[migrate]'"
        ) from None
    from paceline.interop.migrate.python_files import may_need_migration
    from paceline.interop.migrate.python_source import read_source

    readings: dict[Path, PythonSource] = {}
    unread: list[tuple[Path, str]] = []
    collects = gc.isenabled()
    gc.disable()  # what is made here is kept, and to look through it again and again takes a tenth of the time
    try:
        for path, text in texts.items():
            if not may_need_migration(text):
                continue
            try:
                readings[path] = read_source(text)
            except libcst.ParserSyntaxError as error:
                unread.append((path, f"line {error.editor_line}: {error.message}"))
    finally:
        if collects:
            gc.enable()
    return readings, unread


def _choice(readings: dict[Path, PythonSource], texts: dict[Path, str]) -> ModeChoice:
    """Returns the way for these files; modules beside them that they import count too."""
    if not texts:
        return ModeChoice(MigrationMode.IMPORT)
    from paceline.interop.migrate.python_files import choose_mode

    choice = choose_mode({str(path): reading for path, reading in readings.items()})
    if choice.way is MigrationMode.PLUGIN:
        return choice
    for path in _modules_beside(texts, readings):
        if "torch.distributed" in (_text(path) or ""):
            reason = (
                f"{path} mentions torch.distributed and is not among the files to migrate; name its folder for both"
            )
            return ModeChoice(MigrationMode.PLUGIN, reason)
    return choice


def _modules_beside(texts: dict[Path, str], readings: dict[Path, PythonSource]) -> Iterator[Path]:
    """Yields the modules that the files import from their own folders, and that are not among them."""
    from paceline.interop.migrate.python_files import imports_of

    known = {path.resolve() for path in texts}
    folders = {path.parent for path in texts}
    neighbours = {folder: _names_in(folder, known) for folder in folders}
    for path, text in texts.items():
        if not any(name in text for name in neighbours[path.parent]):
            continue  # most files: to parse them all would take longer than all else
        names = [each.name for each in readings[path].imports] if path in readings else imports_of(text)
        for imported in names:
            parts = imported.split(".")
            for length in range(1, len(parts) + 1):
                module = path.parent.joinpath(*parts[:length]).with_suffix(".py")
                if module.is_file() and module.resolve() not in known:
                    yield module


def _names_in(folder: Path, known: set[Path]) -> set[str]:
    """Returns the first words by which a file in a folder could import modules that are not known."""
    return {
        each.stem if each.suffix == ".py" else each.name
        for each in folder.iterdir()
        if each.is_dir() or (each.suffix == ".py" and each.resolve() not in known)
    }
