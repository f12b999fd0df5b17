"""Interpretation of unusual or large scripts."""

from __future__ import annotations

import pytest
from script_findings import findings

from paceline.cli.doctor import Confidence, Severity
from paceline.cli.doctor.script import interpreter


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
