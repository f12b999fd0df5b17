"""Analysis of a Python file: the qualified names of imported objects, and edits."""

from __future__ import annotations

import libcst as cst
import pytest

from paceline.interop.migrate.python_source import Edits, dotted, import_statement, read_source


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch.distributed as dist\ndist.barrier()\n", {"torch.distributed.barrier"}),
        ("from torch import distributed\ndistributed.barrier()\n", {"torch.distributed.barrier"}),
        ("from torch.distributed import barrier as wait\nwait()\n", {"torch.distributed.barrier"}),
        ("barrier()\n", set()),
    ],
)
def test_names_are_qualified_through_imports(text, names):
    assert {use.name for use in read_source(text).uses} == names


def test_only_names_and_attributes_are_dotted():
    assert dotted(cst.parse_expression("a.b.c")) == "a.b.c"
    assert dotted(cst.parse_expression("a().b")) is None


def test_without_edits_the_text_stays_as_it_is():
    text = "x = 1  # as it was\n"
    assert Edits(cst.parse_module(text)).applied() == text


def test_a_missing_module_is_imported_once():
    edits = Edits(cst.parse_module("import paceline\nx = 1\n"), modules={"paceline"})
    assert edits.applied() == "import paceline\nx = 1\n"
    edits = Edits(cst.parse_module("import os\nx = 1\n"), modules={"paceline"})
    assert edits.applied().count("import paceline\n") == 1


def test_an_import_has_a_local_name_only_if_it_differs():
    texts = [cst.Module([]).code_for_node(import_statement("paceline", local)) for local in (None, "paceline", "dist")]
    assert texts == ["import paceline", "import paceline", "import paceline as dist"]
