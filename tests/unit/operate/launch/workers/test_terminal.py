"""Progress bars: one row on a terminal, along with other ranks' lines, and few lines elsewhere."""

from __future__ import annotations

from shown_terminal import bar, nested, shown

from paceline.operate.launch.workers.output import LinePrefixer, TerminalSink
from paceline.operate.launch.workers.terminal import Rows

__all__ = ["shown"]


def test_a_terminal_shows_a_bar_as_one_row(shown):
    drawing = TerminalSink(shown.screen, b"[rank 0] ")
    for done in range(101):
        drawing.feed(bar(done))
    drawing.feed(b"\n")
    assert shown.rows() == ["[rank 0] " + bar(100)[1:].decode(), ""]


def test_lines_of_others_appear_above_the_bar(shown):
    drawing = TerminalSink(shown.screen, b"[rank 0] ")
    others = LinePrefixer(b"[rank 1] ", shown.screen.above)
    for done in range(0, 101, 10):
        drawing.feed(bar(done))
        others.feed(b"loss %d\n" % done)
    losses = [f"[rank 1] loss {done}" for done in range(0, 101, 10)]
    assert shown.rows() == [*losses, "[rank 0] " + bar(100)[1:].decode()]


def test_lines_of_others_appear_above_nested_bars(shown):
    drawing = TerminalSink(shown.screen, b"[rank 0] ")
    drawing.feed(bar(0))
    for done in range(10, 101, 10):
        drawing.feed(nested(done, done // 2))
        shown.screen.above(b"loss %d\n" % done)
    *losses, outer, inner = shown.rows()
    assert losses == [f"loss {done}" for done in range(10, 101, 10)]
    assert (outer, inner) == ("[rank 0] " + bar(100)[1:].decode(), "[rank 0] " + bar(50)[1:].decode())


def test_lines_of_others_appear_above_a_live_display(shown):
    drawing = TerminalSink(shown.screen, b"[rank 0] ")
    drawing.feed(b"\x1b[?25lone 0\ntwo 0")
    for n in range(1, 4):
        shown.screen.above(b"loss %d\n" % n)
        drawing.feed(b"\r\x1b[2K\x1b[1A\x1b[2Kone %d\ntwo %d" % (n, n))
    shown.screen.above(b"loss 4\n")
    assert shown.rows() == ["loss 1", "loss 2", "loss 3", "loss 4", "[rank 0] one 3", "[rank 0] two 3"]


def test_a_killed_display_leaves_the_cursor_visible(shown):
    drawing = TerminalSink(shown.screen, b"")
    drawing.feed(b"\x1b[?25l50%")
    drawing.close()
    shown.screen.above(b"the end\n")
    assert shown.rows() == ["50%", "the end", ""]
    assert shown._bytes.getvalue().endswith(b"50%\n\x1b[?25hthe end\n")


def test_a_prompt_stays_below_the_lines_of_others(shown):
    TerminalSink(shown.screen, b"[rank 0] ").feed(b"(Pdb) p lo")
    shown.screen.above(b"loss 1\n")
    assert shown.rows() == ["loss 1", "[rank 0] (Pdb) p lo"]


def test_a_row_longer_than_the_terminal_is_redrawn_whole():
    rows = Rows(b"[0] ")
    rows.feed(b"x" * 50)
    assert rows.erase(20) == b"\r\x1b[2A\x1b[J"


def test_a_second_stream_does_not_draw_into_the_bar(shown):
    err, out = TerminalSink(shown.screen, b"[rank 0] "), TerminalSink(shown.screen, b"[rank 0] ")
    err.feed(bar(10))
    out.feed(b"loss 1\nlo")
    err.feed(bar(20) + b"\n")
    out.feed(b"ss 2\n")
    rows = ["loss 1", bar(20)[1:].decode(), "loss 2", ""]
    assert shown.rows() == [f"[rank 0] {row}" if row else "" for row in rows]


def test_control_sequences_may_be_cut_anywhere(shown):
    drawing = TerminalSink(shown.screen, b"")
    for byte in b"\x1b[31mone\x1b[0m\r\x1b[2Ktwo":
        drawing.feed(bytes([byte]))
    assert shown.rows() == ["two"]


def test_text_without_control_characters_comes_out_the_same():
    text = b"one\n\ntwo three\nfour"
    short, long = Rows(), Rows(b"")
    short.feed(text)
    for byte in text:
        long.feed(bytes([byte]))
    assert short.final() + short.end() == long.final() + long.end() == [b"one", b"two three", b"four"]
