"""Links within the repository are converted to links within the site, and the reference contains every public name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import paceline

sys.path.append(str(Path(__file__).parents[3] / "release" / "site"))

import public_names
import reference
from checking import broken_links
from links import Place, address, between, place_of, rewritten
from site_search import boost, terms
from table_heads import without_empty_heads

ENGLISH, CHINESE = Place("en", "learn/ddp.md"), Place("zh", "learn/ddp.md")


def test_pages_have_addresses():
    assert address(Place("en", "index.md")) == ""
    assert address(ENGLISH) == "learn/ddp/"
    assert address(Place("en", "learn/index.md")) == "learn/"
    assert address(CHINESE) == "zh/learn/ddp/"
    assert between(ENGLISH, address(CHINESE)) == "../../zh/learn/ddp/"
    assert between(CHINESE, "") == "../../../"


def test_the_two_readmes_are_the_homes():
    assert place_of("README.md") == Place("en", "index.md")
    assert place_of("README.zh.md") == Place("zh", "index.md")
    assert place_of("src/paceline/errors.py") is None


@pytest.mark.parametrize(
    ("place", "link", "there"),
    [
        (ENGLISH, "../data.md#streams", "../data.md#streams"),
        (ENGLISH, "../zh/data.md", "../../zh/data/"),
        (ENGLISH, "../pictures/top.svg", "../pictures/top.svg"),
        (ENGLISH, "../../CHANGELOG.md", "../CHANGELOG.md"),
        (ENGLISH, "../../README.md", "../index.md"),
        (ENGLISH, "../../examples/digits.py", "../files/examples/digits.py"),
        (ENGLISH, "https://example.org/a.md", "https://example.org/a.md"),
        (ENGLISH, "#here", "#here"),
        (CHINESE, "../data.md", "../data.md"),
        (CHINESE, "../../data.md#streams", "../../../data/#streams"),
        (CHINESE, "../../pictures/top.svg", "../pictures/top.svg"),
        (CHINESE, "../../../README.md", "../../../"),
        (CHINESE, "../../../examples/digits.py", "../../../files/examples/digits.py"),
    ],
)
def test_a_link_leads_where_it_did(place, link, there):
    assert rewritten(f"see [this]({link}).", place, lambda path: None) == f"see [this]({there})."


def test_a_link_to_a_folder_is_words_on_the_site():
    assert rewritten("[all of them](../../bench/results)", ENGLISH, lambda path: None) == "all of them"


def test_code_is_left_as_it_is():
    text = "```python\nx = [a](../../examples/digits.py)\n```\n"
    assert rewritten(text, ENGLISH, lambda path: None) == text


def test_files_that_pages_link_to_are_kept():
    kept: list[str] = []
    rewritten("[a](../../examples/digits.py) ![b](../pictures/top.svg)", ENGLISH, kept.append)
    assert kept == ["examples/digits.py"]


def test_the_reference_has_every_public_name():
    names = [name for group in reference.groups() for _, name in group.names]
    assert sorted([*names, "functional", "group"]) == sorted(paceline.__all__)
    text = "".join(reference.pages().values())
    assert "::: paceline.comm.group.collectives.collectives.all_reduce\n" in text
    assert "# paceline.horovod\n" in text and "::: paceline.interop.horovod\n" in text


def test_a_public_module_leads_to_its_source():
    for module in public_names.MODULES:
        assert importlib.util.find_spec(module), module
    assert public_names.source_of("paceline.parallel.hooks") == "paceline.train.ddp.hooks"
    assert public_names.source_of("paceline.parallel.replicate") == "paceline.parallel.replicate"


def test_the_public_names_and_signatures_are_those_of_the_list():
    found = public_names.differences()
    assert not found, "\n".join(
        ["public names have changed; run release/site/public_names.py --write, and read CONTRIBUTING.md:", *found]
    )


def test_the_list_has_every_public_name():
    listed = public_names.marks_in(public_names.LIST.read_text())
    names = {name for module, name in listed if module == "paceline"}
    assert {*names, "functional", "group"} == set(paceline.__all__)
    assert set(listed.values()) == {public_names.STABLE, public_names.PROVISIONAL, public_names.TORCHS}


def test_marks_of_the_list_are_kept():
    text = "[paceline]\nstable       class Work()\n                 wait() -> bool\nprovisional  log()\n"
    assert public_names.marks_in(text) == {("paceline", "Work"): "stable", ("paceline", "log"): "provisional"}


def test_examples_of_a_docstring_are_fenced():
    docstring = "Adds.\n\n>>> add(1)\n[[1]]\n\nMore.\n\n>>> add(2)\n2"
    fences = "Adds.\n\n```pycon\n>>> add(1)\n[[1]]\n```\n\nMore.\n\n```pycon\n>>> add(2)\n2\n```"
    assert reference.fenced(docstring) == fences
    assert reference.fenced("No example.") == "No example."


def test_a_broken_link_of_the_site_is_found(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text('<a href="a/#good">1</a><a href="a/#bad">2</a><a href="b/">3</a><h1 id="x">')
    (tmp_path / "c.html").write_text('<a href="https://example.org/"></a><a href="switch:zh"></a>')
    (tmp_path / "a" / "index.html").write_text('<h2 id="good"><a href="..#x"></a><a href="../../out/">')
    assert [line.rsplit(": ", 1)[0] for line in broken_links(tmp_path)] == [
        "a/index.html: ../../out/",
        "c.html: switch:zh",
        "index.html: a/#bad",
        "index.html: b/",
    ]


def test_only_heads_without_a_word_are_left_out():
    named = "<table><thead><tr><th></th><th>ms</th></tr></thead><tbody></tbody></table>"
    head = '<thead>\n<tr>\n<th></th>\n<th style="text-align: right;"></th>\n</tr>\n</thead>\n'
    nameless = f"<table>\n{head}<tbody></tbody></table>"
    assert without_empty_heads(named + nameless) == named + "<table>\n<tbody></tbody></table>"


def test_a_how_to_page_is_found_before_a_decision():
    assert boost("how-to/resume.md") > boost("data.md") > boost("decisions/0008-checkpoint-format.md")


def test_the_search_keeps_terms_and_titles_whole():
    assert {"弹性训练", "全归约", "归约散发", "全收集", "检查点", "键值存储"} <= set(terms())
    assert "all" not in terms() and "中文" not in terms()
