"""Error messages about gradients: the parameters that they name, and the fix that they suggest."""

from __future__ import annotations

import pytest

from paceline.train.ddp.error_text import (
    add_context,
    late_gradient_text,
    missing_gradient_text,
    sending_buffers_context,
)

WHICH = "the last backward pass"


@pytest.mark.parametrize(
    ("frozen", "static_graph", "parts"),
    [
        ((), False, ("no gradient for 2 of 9 parameters (a, b)", "find_unused_parameters=True")),
        ((), True, ("a, b", "the first backward", "find_unused_parameters=True")),
        (("b",), True, ("no gradient for b, which were frozen", "wrap the module afterwards")),
    ],
)
def test_missing_gradients_are_named_with_the_fix(frozen, static_graph, parts):
    text = missing_gradient_text(WHICH, ["a", "b"], frozen, 9, static_graph)
    assert text.startswith(WHICH)
    assert all(part in text for part in parts)


def test_of_many_parameters_ten_are_named():
    text = missing_gradient_text(WHICH, [f"p{number}" for number in range(12)], (), 12, False)
    assert "p9 and 2 more" in text and "p10" not in text


def test_the_fix_of_a_late_gradient_is_not_in_use_already():
    assert "static_graph=True, or" in late_gradient_text("a", False)
    assert "find_unused_parameters=True instead" in late_gradient_text("a", True)


def test_a_skipped_backward_is_told_only_where_one_is_missing():
    assert "had no backward pass on this rank" in sending_buffers_context("Net", 3, True)
    assert "had no backward pass" not in sending_buffers_context("Net", 3, False)
    assert "before the 3rd forward pass of Net" in sending_buffers_context("Net", 3, False)


def test_a_context_follows_the_message_of_an_error():
    error = TimeoutError("timed out.", 3)
    add_context(error, "This call averages")
    assert error.args == ("timed out. This call averages", 3)
