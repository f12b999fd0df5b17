"""The nightly run: every part runs, and the table and the exit code report the results."""

from __future__ import annotations

import sys
from pathlib import Path

import nightly
import pytest
from launching import is_alive, wait_until
from nightly import chosen, run
from nightly_page import HEADING, Result, row, table, with_results
from nightly_parts import Part, parts

ROOT = Path(__file__).parents[3]


def a_part(name: str, *programs: str, limit_s: float = 20, missing: str = "", **environment: str) -> Part:
    commands = [[sys.executable, "-c", program] for program in programs]
    return Part(name, f"runs {name}", commands, limit_s, lambda: missing, environment)


def test_a_part_that_succeeds_passes_with_what_pytest_counted(tmp_path):
    result = run(a_part("good", "print('==== 3 passed, 1 skipped in 0.1s ====')"), tmp_path)
    assert (result.verdict, result.detail) == ("passed", "3 passed, 1 skipped")


@pytest.mark.parametrize(
    ("printed", "detail"),
    [
        (["100% tests passed, 0 tests failed out of 19"], "100% tests passed, 0 tests failed out of 19"),
        (["100% tests passed out of 19"], "100% tests passed out of 19"),
        (
            ["paceline-0.whl with python3.12: installed in 3.1 s", "paceline-0.whl with python3.13: installed in 3 s"],
            "paceline-0.whl with python3.12: installed in 3.1 s; paceline-0.whl with python3.13: installed in 3 s",
        ),
        (["nothing"], ""),
    ],
)
def test_the_summary_of_a_program_is_told(tmp_path, printed, detail):
    program = "; ".join(f"print({line!r})" for line in printed)
    assert run(a_part("good", program), tmp_path).detail == detail


def test_a_part_ends_with_its_first_command_that_fails(tmp_path):
    result = run(a_part("bad", "print('one')", "print('two'); exit(3)", "print('three')"), tmp_path)
    assert result.verdict == "failed" and "exit code 3" in result.detail
    log = (tmp_path / "bad.log").read_text()
    assert "\ntwo\n" in log and "\nthree\n" not in log


def test_a_part_whose_tools_are_missing_is_skipped(tmp_path):
    result = run(a_part("unable", "exit(1)", missing="there is no srun"), tmp_path)
    assert (result.verdict, result.detail) == ("skipped", "there is no srun")
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_cannot_be_started_fails(tmp_path):
    result = run(Part("absent", "", [["/nowhere/program"]], 20), tmp_path)
    assert (result.verdict, result.detail) == (
        "failed",
        "`/nowhere/program` could not be started: No such file or directory",
    )


def test_a_part_that_does_not_end_is_killed_with_its_children(tmp_path):
    child = tmp_path / "child"
    program = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(300)"
    )
    result = run(a_part("endless", program, limit_s=1.5), tmp_path / "logs")
    assert result.verdict == "failed" and "still running" in result.detail
    wait_until(lambda: not is_alive(int(child.read_text())))


def test_a_part_has_its_environment(tmp_path):
    program = "import os; exit(os.environ['PACELINE_TEST_EXAMPLES'] != '7')"
    assert run(a_part("many", program, PACELINE_TEST_EXAMPLES="7"), tmp_path).verdict == "passed"


@pytest.mark.parametrize(("programs", "code"), [(["pass", "exit(1)", "pass"], 1), (["pass", "pass"], 0)])
def test_later_parts_run_after_a_failure(monkeypatch, capsys, tmp_path, programs, code):
    made = [a_part(f"part{at}", program) for at, program in enumerate(programs)]
    monkeypatch.setattr(nightly, "parts", lambda _: made)
    monkeypatch.setattr(nightly, "LOGS", tmp_path)
    assert nightly.main([]) == code
    told = capsys.readouterr().out
    for at, program in enumerate(programs):
        told_of = next(line for line in told.splitlines() if line.startswith(f"| part{at} |"))
        assert ("failed" if program != "pass" else "passed") in told_of


def test_a_recorded_run_of_some_parts_keeps_the_others(monkeypatch, tmp_path):
    monkeypatch.setattr(nightly, "parts", lambda _: [a_part("one", "pass"), a_part("two", "pass")])
    monkeypatch.setattr(nightly, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(nightly, "PAGE", tmp_path / "nightly.md")
    nightly.PAGE.write_text(f"# Title\n\n{HEADING}\n{table(['| one | 1 May 2020 | failed |', '| two | older |'])}\n")
    assert nightly.main(["--record", "two"]) == 0
    page = nightly.PAGE.read_text()
    assert page.startswith(f"# Title\n\n{HEADING}")
    assert "| one | 1 May 2020 | failed |" in page
    assert "| two | " in page and "older" not in page


def test_a_row_says_when_where_and_how_long():
    told = row(Result("soak", "passed", 125.0, "5 passed", load=3.2), "1 May 2026")
    assert told.startswith("| soak | 1 May 2026 | passed | 2.1 min | 3 | ")
    assert told.endswith(" | 5 passed |")
    assert row(Result("gpu", "skipped", 0.0, "a | b"), "1 May 2026") == r"| gpu | 1 May 2026 | skipped | | | | a \| b |"


def test_parts_can_be_chosen_by_name():
    every = [a_part("one"), a_part("two"), a_part("three")]
    assert [part.name for part in chosen(["three", "one"], every)] == ["one", "three"]
    assert chosen([], every) == every
    with pytest.raises(SystemExit, match="there is no part four; the parts are one, two, three"):
        chosen(["four"], every)


def test_a_part_keeps_its_newest_result():
    page = f"# Title\n\n{HEADING}\n{table(['| gone | x |', '| two | 1 May | passed |'])}\n"
    results = [Result("two", "skipped", 0.0, "no tool"), Result("one", "passed", 3.0)]
    lines = with_results(page, results, "2 May", ["one", "two"]).splitlines()
    assert lines[:3] == ["# Title", "", HEADING.strip()]
    assert [line[:18] for line in lines[6:]] == ["| one | 2 May | pa", "| two | 1 May | pa"]
    assert with_results(page, results, "2 May", ["one", "two"]).count("| gone |") == 0


def test_a_skipped_part_has_a_row_until_it_runs():
    page = with_results(f"{HEADING}\n", [Result("one", "skipped", 0.0, "no tool")], "1 May", ["one"])
    assert page.splitlines()[-1] == "| one | 1 May | skipped | | | | no tool |"
    page = with_results(page, [Result("one", "failed", 2.0)], "2 May", ["one"])
    assert "| one | 2 May | failed | 2 s |" in page and "no tool" not in page


def test_a_page_without_the_section_is_refused():
    with pytest.raises(ValueError, match="has no line '## The newest results'"):
        with_results("# Title\n", [], "1 May", [])


def test_the_page_describes_every_part():
    page = (ROOT / "docs" / "nightly.md").read_text()
    described = page.partition(HEADING)[0]
    for part in parts(ROOT):
        assert f"| `{part.name}` |" in described, part.name
