"""Results and errors of one rank's work, as the other ranks receive them."""

from __future__ import annotations

import pytest

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.rank_channel import decode_result, encode_result, fault_of, is_success, require_success


def failing(error: Exception) -> bytes:
    def work() -> bytes:
        raise error

    return encode_result(work, "rank 1")


def test_a_result_arrives_as_it_is():
    answer = encode_result(lambda: b"data", "rank 1")
    assert is_success(answer) and fault_of(answer) is None
    assert decode_result(answer) == b"data"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (OSError("disk is full"), CheckpointError, "^rank 1: disk is full$"),
        (CheckpointError("rank 0: no place"), CheckpointError, "^rank 0: no place$"),
        (
            CheckpointDamagedError("a part is cut"),
            CheckpointDamagedError,
            "^rank 1: a part is cut$",
        ),
        (ZeroDivisionError("of the user"), CheckpointError, r"(?s)rank 1: ZeroDivisionError.*Traceback"),
    ],
)
def test_an_error_names_its_rank_once(error, kind, text):
    with pytest.raises(kind, match=text) as raised:
        decode_result(failing(error))
    assert type(raised.value) is kind


def test_the_first_error_of_all_ranks_is_raised():
    answers = [encode_result(bytes, "rank 0"), failing(OSError("first")), failing(OSError("second"))]
    with pytest.raises(CheckpointError, match="first"):
        require_success(answers)
    assert require_success(answers[:1]) == b""


def test_an_error_about_a_path_that_is_not_utf8_arrives():
    with pytest.raises(CheckpointError, match=r"^rank 1: no place in /a.udcff$"):
        decode_result(failing(OSError("no place in /a\udcff")))
