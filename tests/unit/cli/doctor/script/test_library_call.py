"""Recognition of library functions and objects by their names in a script."""

from __future__ import annotations

import ast

import pytest

from paceline.cli.doctor.script.library_call import initializes, is_generator, qualified_name, starts_processes


def test_a_name_is_qualified_through_attributes_and_calls():
    assert qualified_name(ast.parse("torch.no_grad().x", mode="eval").body) == "torch.no_grad.x"
    assert qualified_name(ast.parse("1 + 2", mode="eval").body) == ""


@pytest.mark.parametrize(
    ("text", "connects"),
    [
        ("dist.init_process_group()", True),
        ("import horovod.torch as hvd\nhvd.init()", True),
        ("deepspeed.init_distributed()", True),
        ("pool.init()", False),
    ],
)
def test_a_script_that_connects_the_ranks_is_recognized(text, connects):
    assert initializes(ast.parse(text)) is connects


def test_a_script_that_starts_processes_is_recognized():
    assert starts_processes(ast.parse("mp.Process(target=work).start()").body)
    assert not starts_processes(ast.parse("work(0)").body)


def test_a_function_with_a_yield_is_a_generator():
    assert is_generator(ast.parse("def batches():\n    yield 1").body[0])
    assert not is_generator(ast.parse("def batches():\n    return [1]").body[0])
