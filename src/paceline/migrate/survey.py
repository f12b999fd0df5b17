"""Decides by which way a program comes over, from all of its files: they share one process group."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.migrate.names import Way, group_user, needs_torchs_groups
from paceline.migrate.places import Choice
from paceline.migrate.reading import Imported, Reading, Use


def choose_way(readings: Mapping[str, Reading]) -> Choice:
    """Returns the way for a program of these files, by their names.

    What is built on torch's groups (FSDP, DTensor, torch's checkpoints, other libraries) needs torch's default group.
    The whole program then stays with torch.distributed and changes its backend.
    """
    for file, reading in sorted(readings.items()):
        for each in sorted(reading.concerning(), key=lambda each: each.line):
            if needs_torchs_groups(each.name):
                return Choice(Way.PLUGIN, f"{file}:{each.line} uses {each.name}, which is built on torch's groups")
        for line, module in reading.stars:
            if needs_torchs_groups(f"{module}.*"):
                return Choice(Way.PLUGIN, f"{file}:{line} imports * from {module}, whose names are not known")
        everything: list[Imported | Use] = [*reading.imports, *reading.uses]
        for found in everything:
            if (library := group_user(found.name)) is not None:
                return Choice(Way.PLUGIN, f"{file}:{found.line} uses {library}, which uses torch's default group")
    return Choice(Way.IMPORT)
