"""Findings of the doctor in a script, their lines, and correct code without findings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from planted_mistakes import HEALTHY, MISTAKES

from paceline.cli.doctor.command import Confidence, Diagnostic, Severity, check_script
from paceline.cli.doctor.script import interpreter
from paceline.cli.main import main

CASES = [(rule, number) for rule, scripts in MISTAKES.items() for number in range(len(scripts))]


def findings(text: str, confidence: Confidence = Confidence.HIGH) -> list[Diagnostic]:
    return [each for each in check_script(text) if each.confidence is confidence]


@pytest.mark.parametrize(("rule", "number"), CASES, ids=[f"{rule}-{number}" for rule, number in CASES])
def test_a_mistake_is_found_on_its_line_and_nothing_else(rule, number):
    text = MISTAKES[rule][number]
    (line,) = (place for place, code in enumerate(text.splitlines(), 1) if code.endswith("# !"))
    found = findings(text)
    assert [(each.about, each.line) for each in found] == [(rule, line)]
    assert all(each.level is Severity.BAD and each.seen and each.reason and each.fix for each in found)


@pytest.mark.parametrize("text", HEALTHY.values(), ids=HEALTHY)
def test_what_is_right_is_left_alone(text):
    assert findings(text) == []


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[3] / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_our_examples_have_none_of_them(path):
    assert findings(path.read_text()) == []


def test_a_message_names_the_ranks_and_the_line_of_the_test():
    text = "import paceline as dist\ndist.init_process_group()\nif dist.get_rank() < 2:\n    dist.barrier()\n"
    (found,) = findings(text)
    assert found.seen == "barrier()"
    assert found.reason.startswith("only the ranks below 2 would make this call (the test is on line 3)")
    assert found.fix == "move the call out of the branch, so that all ranks make it"


def test_a_function_that_is_not_called_has_low_confidence():
    text = "import torch.distributed as dist\ndef log(rank):\n    if rank == 0:\n        dist.barrier()\n"
    assert findings(text) == []
    (found,) = findings(text, Confidence.LOW)
    assert (found.about, found.line, found.level) == ("not-all-ranks", 4, Severity.NOTE)


def test_a_script_that_is_too_large_has_low_confidence(monkeypatch):
    monkeypatch.setattr(interpreter, "_MOST_STEPS", 100)
    text = "import paceline as dist\ndist.init_process_group()\nif dist.get_rank() == 0:\n    dist.barrier()\n"
    text += "x = 1\n" * 100
    assert findings(text) == []
    assert [each.about for each in findings(text, Confidence.LOW)] == ["not-all-ranks"]


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return f(x)\nf(1)",
        "x = [1]\nx.append(x)\nprint(x)",
        "class A:\n    def __init__(self):\n        self.me = self\n        self.me.me = A()\nA()",
        "while True:\n    try:\n        raise A\n    except A:\n        continue\n    finally:\n        f()",
        "def f(*a, b=1, **c):\n    return {**c, 'a': a}\nf(*[1, 2], **{'b': 2})\nf = lambda: (yield)\nf()",
        "import a.b\nfrom . import c\nx: int = 1 in None\ny = 1 / 0\nz = [i for i in range(3) if i]\nw = x if y else z",
        "async def f():\n    async with g() as h:\n        async for i in h:\n            await i\nglobal x\ndel x",
        "match x:\n    case [1, *r]:\n        pass\n    case {'a': b}:\n        pass\n    case _:\n        pass",
    ],
)
def test_any_program_can_be_interpreted(text):
    assert findings(text) == []


def test_the_command_prints_line_reason_and_fix_and_fails(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("import paceline as dist\ndist.init_process_group()\nopen('log.txt', 'w').write('done')\n")
    assert main(["doctor", str(path)]) == 1
    told = capsys.readouterr().out
    assert re.search(r' BAD  .*train.py:3: all-ranks-save: open\(..., "w"\) on every rank\n +why: .*\n +fix: ', told)
    assert main(["doctor", "--json", str(path)]) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert (finding["line"], finding["confidence"], finding["level"]) == (3, "high", "BAD")


def test_findings_with_low_confidence_are_shown_on_request(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("import paceline as dist\ndist.init_process_group()\nopen('log.txt', 'a').write('done')\n")
    assert main(["doctor", str(path)]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0].endswith("train.py: none of the known mistakes was found")
    assert told.splitlines()[1].strip() == "1 more finding has low confidence; show with --confidence low"
    assert main(["doctor", "--confidence", "low", str(path)]) == 0
    assert re.search(r"note  .*train.py:3: all-ranks-save: .* \(low confidence\)\n +why: ", capsys.readouterr().out)


def test_what_is_no_python_is_said(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("def (:\n")
    assert main(["doctor", str(path)]) == 2
    assert "invalid syntax" in capsys.readouterr().err
