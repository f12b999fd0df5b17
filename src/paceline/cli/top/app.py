"""The Textual interface of `paceline top`: a table that can be scrolled and sorted, and output that can be filtered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer, RichLog, Sparkline, Static

from paceline.cli.top.client import PageUnreachableError
from paceline.cli.top.text_view import columns_of, links_of, sentence_of
from paceline.operate.dashboard.dashboard_state import PARTS
from paceline.operate.diagnosis.finding import milliseconds

_KEYS = ("rank", "host", "state", "step", "samples_per_s", "compute", "wait", "memory_nbytes", "silent_s", "doing")
_COLORS_OF_HEALTH = {"good": "green", "bad": "red", "waiting": "yellow", "over": "bold"}
_PART_COLORS = {"data": "yellow", "forward": "cyan", "backward": "blue", "exposed": "red", "optimizer": "magenta"}
_BAR = 60
_LINKS_WIDTH = 80
_GAP = 2  # space between two columns of a DataTable, in characters


class Top(App[None]):
    """Displays the job state that `look` returns (decoded JSON), refreshed every `every_s` seconds."""

    CSS = """
    #head { height: auto; padding: 0 1; }
    #verdict { height: auto; padding: 0 1; color: $error; }
    #ranks { height: 1fr; }
    #below { height: 12; }
    #curve { width: 40; padding: 0 1; }
    #log { width: 1fr; border-left: solid $panel; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit (the job continues)"),
        Binding("s", "sort", "sort by the next column"),
        Binding("f", "filter", "output of this rank only"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, look: Callable[[], Mapping[str, Any]], every_s: float) -> None:
        super().__init__()
        self._look = look
        self._every_s = every_s
        self._order = 0
        self._only: int | None = None
        self._seen = 0
        self._heads: list[str] = []
        self._picture: Mapping[str, Any] = {}

    def compose(self) -> ComposeResult:
        """Creates the widgets."""
        yield Static(id="head")
        yield Static(id="verdict")
        yield DataTable(id="ranks", cursor_type="row", zebra_stripes=True)
        with Horizontal(id="below"):
            with Vertical(id="curve"):
                yield Static("", id="loss")
                yield Sparkline([], id="spark")
            yield RichLog(id="log", max_lines=500, wrap=True)
        yield Footer()

    def on_mount(self) -> None:
        """Starts the periodic refresh."""
        self.set_interval(self._every_s, self._refresh)
        self._refresh()

    def action_sort(self) -> None:
        """Sorts by the next column."""
        self._order = (self._order + 1) % len(_KEYS)
        self._show_ranks()

    def action_filter(self) -> None:
        """Toggles between the output of the rank under the cursor and that of all ranks."""
        row = self.query_one("#ranks", DataTable).cursor_row
        rows = self._sorted()
        self._only = None if self._only is not None or row >= len(rows) else int(rows[row]["rank"])
        self.query_one("#log", RichLog).clear()
        self._seen = 0
        self._show_log()

    @work(thread=True, exclusive=True)
    def _refresh(self) -> None:
        try:
            picture = self._look()
        except PageUnreachableError as error:
            self.call_from_thread(self.query_one("#verdict", Static).update, str(error))
            return
        self.call_from_thread(self._show, picture)

    def _show(self, picture: Mapping[str, Any]) -> None:
        self._picture = picture
        header, verdict = picture["header"], picture["verdict"]
        head = Text(header["sentence"].capitalize(), style=_COLORS_OF_HEALTH[header["health"]])
        figures = picture["figures"]
        if figures is not None:
            head.append(
                f"\na step takes {milliseconds(figures['step'])}, {figures['exposed_share']:.0%} spent waiting\n"
            )
            head.append(_bar(figures["parts"]))
        if picture["what_if"] is not None:
            head.append(f"\n{picture['what_if']['sentence']}", style="yellow")
        if picture["network"]:
            head.append(f"\n{sentence_of(picture['network'])}", style="red")
        head.append("".join(f"\n{sentence_of(words)}" for words in picture["owed"]), style="red")
        head.append("".join(f"\n{line}" for line in links_of(picture["links"], _LINKS_WIDTH, False)))
        self.query_one("#head", Static).update(head)
        self.query_one("#verdict", Static).update(verdict["sentence"] if verdict is not None else "")
        self._show_ranks()
        self._show_curve()
        self._show_log()

    def _sorted(self) -> list[Mapping[str, Any]]:
        key = _KEYS[self._order]
        numbers = self._order >= _KEYS.index("step") and key != "doing"
        rows = list(self._picture.get("ranks", ()))
        return sorted(rows, key=lambda row: (-(row[key] or 0) if numbers else row[key], row["rank"]))

    def _show_ranks(self) -> None:
        table = self.query_one("#ranks", DataTable)
        place = table.cursor_row
        table.clear()
        rows = self._sorted()
        columns = columns_of(rows, self.size.width - _GAP, _GAP)
        heads = [column.head for column in columns]
        if heads != self._heads:
            table.clear(columns=True)
            table.add_columns(*heads, "doing")
            self._heads = heads
        for row in rows:
            style = "red" if row["is_blamed"] else ""
            slow = "red bold" if row["is_slow"] else style
            cells = [
                Text(
                    column.text(row),
                    slow if column.head == "own time" else style,
                    justify="left" if column.width < 0 else "right",
                )
                for column in columns
            ]
            table.add_row(*cells, Text(row["doing"], style))
        table.move_cursor(row=place)

    def _show_curve(self) -> None:
        points = self._picture["curves"]["items"]
        if not points:
            return
        name = "loss" if any(point["name"] == "loss" for point in points) else points[0]["name"]
        values = [point["mean"] for point in points if point["name"] == name and point["mean"] is not None]
        if values:
            self.query_one("#loss", Static).update(f"{name}  {values[-1]:.4g}")
            low = min(values)
            self.query_one("#spark", Sparkline).data = [value - low for value in values]

    def _show_log(self) -> None:
        log = self._picture["log"]
        shown = self.query_one("#log", RichLog)
        for line in log["items"][max(0, self._seen - log["first"]) :]:
            if self._only is None or line["rank"] == self._only:
                shown.write(Text(f"rank {line['rank']}  {line['text']}", "yellow" if line["stream"] == 2 else ""))
        self._seen = log["first"] + len(log["items"])


def _bar(parts: list[float]) -> Text:
    total = sum(parts) or 1.0
    bar, words = Text(), Text()
    for part, time in zip(PARTS, parts, strict=True):
        style = _PART_COLORS.get(part, "bright_black")
        bar.append("█" * round(_BAR * time / total), style)
        if time / total >= 0.01:
            words.append(f"  {'waiting' if part == 'exposed' else part} {time / total:.0%}", style)
    return bar + words
