"""The figures in the documentation match the results in `bench/results`."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import re
import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).parents[3] / "bench"))  # after `tests`, because both have a module `hosts`

import report
import run
from publish import pages, tables
from publish.catalog import RUNS, USUAL
from publish.results import Result, read_all

ROOT = Path(__file__).parents[3]
PERFORMANCE = ROOT / "docs" / "performance.md"
PAGES = pages.pages()
OLDER = {"shards-loaded"}  # kept, but no longer measured


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return read_all()


@pytest.fixture(scope="module")
def drawn(results) -> dict[str, str]:
    """Returns the pictures; skips the test if matplotlib does not have the pinned version."""
    matplotlib = pytest.importorskip("matplotlib")
    (pinned,) = re.findall(r"^matplotlib==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if matplotlib.__version__ != pinned:
        pytest.skip(f"the pictures in docs were drawn by matplotlib {pinned}, and here is {matplotlib.__version__}")
    from publish.plots import PICTURES

    return {name: draw(results) for name, draw in PICTURES.items()}


def test_the_pages_agree_with_the_results(results):
    texts = {page: page.read_text() for page in PAGES}
    wrong = [str(page.relative_to(ROOT)) for page, text in texts.items() if pages.filled(text, results, page) != text]
    assert not wrong, f"these pages do not agree with bench/results: {', '.join(wrong)}; run `make figures`"


def test_the_pages_with_figures_are_found():
    assert {ROOT / "README.md", ROOT / "README.zh.md", PERFORMANCE} <= set(PAGES)


def test_a_page_follows_its_results(results):
    text = PERFORMANCE.read_text()
    changed = dict(results)
    first = results["all_reduce"].tables[0]
    rows = copy.deepcopy(first.rows)
    rows[0]["p50 µs"] = 123_456.0
    changed["all_reduce"] = dataclasses.replace(results["all_reduce"], tables=(dataclasses.replace(first, rows=rows),))
    assert "123,456" not in text
    assert "| 2 | 4 B | 123,456 (" in pages.filled(text, changed, PERFORMANCE)


def test_a_page_in_a_folder_links_to_the_same_results(results):
    text = "<!-- figures: ddp -->\n<!-- end of figures -->"
    assert "](../bench/results/ddp.json)" in pages.filled(text, results, PERFORMANCE)
    assert "](../../bench/results/ddp.json)" in pages.filled(text, results, ROOT / "docs" / "zh" / "performance.md")


def test_no_figure_on_the_page_is_copied_by_hand():
    outside = re.sub(r"<!-- figures: .*?<!-- end of figures -->", "", PERFORMANCE.read_text(), flags=re.DOTALL)
    copied = [line for line in outside.split("\n") if line.startswith("|") and re.search(r"\|[^|`]*\d[^|`]*\|", line)]
    assert copied == [], "put these figures into bench/results, and markers into docs/performance.md; it says how"


def test_the_pictures_agree_with_the_results(drawn):
    for name, svg in drawn.items():
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        path = ROOT / "docs" / "pictures" / name
        assert path.read_text() == svg, f"{name} does not agree with bench/results: run `make figures`"


def test_the_pictures_follow_light_and_dark(drawn):
    for svg in drawn.values():
        rules = re.findall(r'\[style\*="fill: (#\w+)"\]\{fill:(#\w+) !important\}', svg)
        painted = set(re.findall(r"fill: (#\w{6})", svg.split("</style>", 1)[1])) - {"#000000"}
        assert painted <= {light for light, _ in rules}
        assert all(light != dark for light, dark in rules)


def test_every_result_says_how_it_was_measured(results):
    for name, result in results.items():
        assert datetime.date.fromisoformat(result.date) <= datetime.date.today() + datetime.timedelta(days=1), name
        assert result.machine and result.versions.get("torch"), name
        assert result.origin in ("measured", "documentation"), name
        python, script, *_ = shlex.split(result.command)
        assert python == "python" and (ROOT / script).is_file(), name
        assert all(table.rows for table in result.tables), name
        assert name in RUNS or name in OLDER, f"bench/publish/catalog.py does not say how to measure {name} again"


def test_the_catalog_names_scripts_that_exist():
    assert set(USUAL) <= set(RUNS)
    assert [words[0] for words in RUNS.values() if not (ROOT / "bench" / words[0]).is_file()] == []


def test_a_benchmark_is_chosen_by_its_name():
    assert run.chosen(["ddp", "store", "ddp"]) == ["ddp", "store"]
    assert run.chosen(["usual"]) == list(USUAL)
    assert run.chosen(["all"]) == list(RUNS)
    assert run.chosen([]) == []


def test_an_unknown_benchmark_is_refused_with_the_names():
    with pytest.raises(SystemExit, match=r"there is no benchmark ddpp; there are: usual, all, .*\bddp\b.*\bstore\b"):
        run.chosen(["ddp", "ddpp"])


def test_a_benchmark_that_fails_leaves_the_old_result(tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "NAME.json").write_text("old")
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setitem(run.RUNS, "NAME", ("failing.py",))
    assert not run.run("NAME", tmp_path)
    assert (tmp_path / "NAME.json").read_text() == "old"


def test_what_a_benchmark_writes_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench/ddp.py", "--ranks", "4", "--json", "x.json", "--models", "wide MLP"])
    report.show("a title", [{"by": "paceline", "n": 3, "p50 µs": 1.5}], str(tmp_path / "ddp.json"))
    result = read_all(tmp_path)["ddp"]
    assert result.command == "python bench/ddp.py --ranks 4 --models 'wide MLP'"
    assert result.row(by="paceline") == {"by": "paceline", "n": 3, "p50 µs": 1.5}
    with pytest.raises(ValueError, match=r"ddp.json has 0 rows with \{'by': 'gloo'\}"):
        result.row(by="gloo")


def test_the_percentile_of_few_values_is_within_them():
    assert report.spread([3.0], 10) == {"n": 10, "p50_s": 3.0, "p95_s": 3.0}
    assert 2.0 < report.p95([1.0, 2.0, 3.0]) <= 3.0
    assert report.p95([float(value) for value in range(101)]) == 95.0
    assert report.p5([float(value) for value in range(101)]) == 5.0


def test_a_table_shows_three_digits_and_no_empty_column():
    rows = [{"a": 1234.56, "b": None, "c": 0.12345}, {"a": 7, "b": None, "c": None}]
    assert (
        tables.table(rows, {"a": "a", "b": "b", "c": "c"}) == "| a | c |\n| --- | --- |\n| 1,235 | 0.123 |\n| 7 | - |"
    )


def test_contestants_share_a_line_of_a_table():
    rows = [
        {"size": "4 B", "by": "paceline", "p50 µs": 2.0, "p95 µs": 3.0},
        {"size": "4 B", "by": "gloo", "p50 µs": 300.0, "p95 µs": None},
    ]
    columns = {
        "ours": tables.spread("paceline"),
        "gloo": tables.spread("gloo"),
        "ratio": tables.ratio("gloo", "paceline"),
    }
    made = tables.pivot(rows, {"size": "size"}, columns)
    assert made.split("\n")[2] == "| 4 B | 2 (3) | 300 | 150 |"
