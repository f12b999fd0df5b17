"""Lines that several processes print to one notebook cell are not interleaved."""

from __future__ import annotations

import io

from paceline.operate.launch.spawn import WholeLines


class Pieces(io.StringIO):
    """A stream that records each write."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return len(text)


def test_a_line_and_its_end_are_one_piece():
    stream = Pieces()
    lines = WholeLines(stream)
    print("rank", 0, file=lines)
    print("rank", 1, file=lines)
    assert stream.pieces == ["rank 0\n", "rank 1\n"]


def test_several_lines_at_once_are_passed_on_together():
    stream = Pieces()
    lines = WholeLines(stream)
    assert lines.write("one\ntwo\nth") == 10
    assert stream.pieces == ["one\ntwo\n"]
    lines.write("ree\n")
    assert stream.pieces == ["one\ntwo\n", "three\n"]


def test_an_unfinished_line_is_passed_on_when_it_is_flushed():
    stream = Pieces()
    print("10 %", end="", flush=True, file=WholeLines(stream))
    assert stream.pieces == ["10 %"]
