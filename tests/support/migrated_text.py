"""The text of a program after its migration."""

from __future__ import annotations

from paceline.interop.migrate.names import MigrationMode
from paceline.interop.migrate.python_files import choose_mode, migrate_python
from paceline.interop.migrate.python_source import read_source


def migrated(text: str, way: MigrationMode | None = None):
    reading = read_source(text)
    return migrate_python(reading, choose_mode({"train.py": reading}, {}).way if way is None else way)
