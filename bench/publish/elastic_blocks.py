"""Defines the blocks about elastic training."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from publish.results import Result, Row
from publish.tables import Cell, duration, markdown, number, source, table

Results = Mapping[str, Result]

_OTHERS, _MAJORITY = "others' pause", "majority's pause"  # the column names
_AT_SLOWEST = "at the slowest's pace / sum"


def deaths(results: Results) -> str:
    ours, peers = results["elastic-death"], results["elastic-peers"]
    rows = [*ours.rows(), *(row for row in peers.rows() if "paceline" not in str(row["system"]))]
    columns: dict[str, Cell] = {
        "": "system",
        "deaths": "kills",
        "n": "pause n",
        "pause p50": lambda row: duration(row["pause p50 ms"]),
        "p99": lambda row: duration(row["pause p99 ms"]),
        "max": lambda row: duration(row["pause max ms"]),
        "repeated steps": "redone",
        "other workers restarted": "others restarted",
        "samples lost": "samples lost",
        "jobs with a bit-identical final state": lambda row: (
            "not guaranteed" if row["digest equal"] == "-" else row["digest equal"]
        ),
    }
    return "\n\n".join([table(rows, columns), source(ours, peers)])


def joining(results: Results) -> str:
    """Returns a table about replacements that join, for both loops."""

    def times(row: Row, p50: str, most: str | None = None) -> str:
        if row[p50] is None:
            return ""
        return f"{row[p50]:.2f}" + (f" ({row[most]:.2f})" if most else "") + " times as long"

    def pause(row: Row, name: str) -> str:
        if not row[f"{name} n"]:
            return ""
        return f"{duration(row[f'{name} p50 ms'])} ({duration(row[f'{name} max ms'])})"

    columns: dict[str, Cell] = {
        "": "where",
        "loop": "loop",
        "additional state": lambda row: "1 GiB" if row["state MiB"] == 1024 else f"{row['state MiB']} MiB",
        "n": "takes part n",
        "joined after, p50": lambda row: f"{row['takes part p50 ms'] / 1000:.2g} s",
        "p99": lambda row: f"{row['takes part p99 ms'] / 1000:.2g} s",
        "pause on entry": lambda row: pause(row, "others' pause"),
        "longest pause before entry": lambda row: pause(row, "pause while it learns"),
        "step during the transfer": lambda row: times(row, "others' step meanwhile p50", "others' step meanwhile"),
        "step next to an unrelated busy process": lambda row: times(row, "step beside a stranger"),
    }
    result = results["elastic-join"]
    return "\n\n".join([table(result.rows(), columns), source(result)])


def events(results: Results) -> str:
    """Returns a table of all other events in a job."""
    names = ("elastic-overhead", "elastic-frozen", "elastic-coordinator", "elastic-speeds", "elastic-thin")
    lines = [line for name in names for line in _EVENTS[name](results[name])]
    return "\n\n".join([markdown(["event", "result"], lines), source(*(results[name] for name in names))])


def _overhead(result: Result) -> list[tuple[str, str]]:
    def compared(case: str, column: str) -> str:
        rows = result.rows(case)
        times = ", ".join(f"{row['model']} {row[column]:.2f}" for row in rows)
        least, most = min(row["ratio of a turn p10"] for row in rows), max(row["p90"] for row in rows)
        return f"{times} times as long (n = {rows[0]['n']}; 80% of the ratios are between {least:.2f} and {most:.2f})"

    return [
        (
            "no event: a step of the elastic loop, compared with the same loop under plain `paceline run`",
            compared("overhead", "elastic / plain"),
        ),
        (
            "no event: as many shards as workers, compared with `DistributedDataParallel` on the same samples",
            compared("shards", "shards / ddp"),
        ),
    ]


def _frozen(result: Result) -> list[tuple[str, str]]:
    stopped = result.row("frozen", worker="stopped (SIGSTOP)")
    slow = next(row for row in result.rows("frozen") if "slower" in str(row["worker"]))
    (cut,) = result.rows("partition")
    left_out = "no worker is expelled" if slow["left out"] == 0 else f"it is expelled {slow['left out']} times"
    return [
        (
            "a worker is stopped (SIGSTOP)",
            f"the other workers pause for {_pause(stopped, _OTHERS, stopped['left out'])}",
        ),
        (f"a worker is {slow['worker']}", left_out),
        (
            "a partition separates five machines into three and two",
            f"the majority pauses for {_pause(cut, _MAJORITY, cut['cuts'])}; the minority commits "
            f"{number(cut['commits of the minority'] or 'nothing')}",
        ),
    ]


def _coordinator(result: Result) -> list[tuple[str, str]]:
    lost, reset = result.rows("coordinator")
    return [
        (
            "the launcher that coordinates three machines is killed together with its worker",
            f"the other workers pause for {_pause(lost, 'longest pause', lost['times'])}; another launcher becomes the "
            f"coordinator after {duration(lost['new coordinator ms'])}",
        ),
        (
            "a connection to the coordinating launcher is reset",
            f"the longest pause is {_pause(reset, 'longest pause', reset['times'])}",
        ),
    ]


def _pause(row: Row, name: str, times: object) -> str:
    return f"{duration(row[f'{name} p50 ms'])}, at most {duration(row[f'{name} max ms'])} ({times} runs)"


def _speeds(result: Result) -> list[tuple[str, str]]:
    return [
        (
            f"workers with the relative speeds {row['speeds'].replace(' ', ', ')}, set by cgroups; "
            f"{row['shards']} shards, steps of {duration(1000 / row['together steps/s'])}",
            f"the job reaches {row['together / sum']:.2f} of the sum of the speeds ({row['least']:.2f} to "
            f"{row['most']:.2f} in {row['n']} runs); at the pace of the slowest worker, it would reach "
            f"{row[_AT_SLOWEST]:.2f}",
        )
        for row in result.rows("speeds")
    ]


def _thin(result: Result) -> list[tuple[str, str]]:
    (row,) = result.rows("thin")
    steps = row.get("steps") or int(row["step n"])
    return [
        (
            "two machines are connected at 10 Mbit/s",
            f"{_expelled(row['expelled'])} in {steps} steps of {duration(row['step p50 ms'])}",
        )
    ]


def _expelled(count: int) -> str:
    return f"{count} workers are expelled" if count else "no worker is expelled"


_EVENTS: dict[str, Callable[[Result], list[tuple[str, str]]]] = {
    "elastic-overhead": _overhead,
    "elastic-frozen": _frozen,
    "elastic-coordinator": _coordinator,
    "elastic-speeds": _speeds,
    "elastic-thin": _thin,
}

ELASTIC: dict[str, Callable[[Results], str]] = {
    "elastic-death": deaths,
    "elastic-join": joining,
    "elastic-events": events,
}
