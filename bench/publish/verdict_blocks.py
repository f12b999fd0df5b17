"""Generates the tables of correct and false diagnoses in docs/observe.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from publish.results import Result, Row
from publish.tables import markdown, number, source

Results = Mapping[str, Result]

_FAULTS = {
    "skip": "a rank skips a call",
    "extra": "a rank issues a call twice",
    "shape": "a rank's tensor has a different shape",
    "order": "a rank issues its calls in a different order",
    "stop": "a rank is stopped (SIGSTOP)",
    "kill": "a rank is killed (SIGKILL)",
    "loader": "a rank waits for its data",
    "stuck": "a rank is stuck in native code",
    "deadlock": "two groups wait for each other",
    "raise": "a rank raises an exception",
    "root": "a rank passes a different root",
    "dtype": "a rank's tensor has a different dtype",
    "leave": "a rank exits early without an error",
    "exit": "a rank exits with an error code",
    "crash": "a rank crashes (SIGSEGV)",
    "sleep": "a rank sleeps",
    "lock": "a rank waits for a lock",
    "child": "a rank waits for a child process",
    "thread": "a thread of a rank has failed",
    "receive": "a rank receives a message that no rank sends",
    "group": "a rank alone creates a group",
    "memory": "a rank uses all memory",
    "slow_core": "a rank computes more slowly",
    "slow_link": "the network is slow",
}


def faults(results: Results) -> str:
    """Returns a line for each class of faults, and a line for all classes together."""
    result = results["verdicts"]
    rows = result.rows("faults")
    heads = ["fault", "one host", "two hosts", "time to verdict: median", "maximum", "torch, one host"]
    lines = [
        [told, *_counts([row for row in rows if row["fault"] == fault])]
        for fault, told in _FAULTS.items()
        if any(row["fault"] == fault for row in rows)
    ]
    return "\n\n".join([markdown(heads, [*lines, ["all", *_counts(rows, has_times=False)]]), source(result)])


def _counts(rows: Sequence[Row], has_times: bool = True) -> list[object]:
    """Returns a summary of rows as cells: correct runs on 1 and 2 hosts, verdict times, and torch's correct runs."""
    by_hosts = [[row for row in rows if row["hosts"] == hosts] for hosts in (1, 2)]
    torch = [row for row in rows if row.get("torch names the rank") is not None]
    times = [row for row in rows if has_times and row.get("median s") is not None]
    return [
        *(_of(own, "right") for own in by_hosts),
        _seconds(times, "median s"),
        f"{number(max(row['longest s'] for row in times))} s" if times else None,
        _of(torch, "torch names the rank"),
    ]


def _of(rows: Sequence[Row], column: str) -> str | None:
    """Returns the number of runs counted in a column and the total number of runs, as text."""
    return f"{sum(row[column] for row in rows)} of {sum(row['runs'] for row in rows)}" if rows else None


def _seconds(rows: Sequence[Row], column: str) -> str | None:
    """Returns the range of a column's times."""
    values = sorted(row[column] for row in rows)
    ends = list(dict.fromkeys(number(value) for value in values[:: max(1, len(values) - 1)]))
    return f"{' to '.join(ends)} s" if ends else None


def healthy(results: Results) -> str:
    """Returns a line for each kind of work during which rank 0 keeps the others waiting."""
    result = results["verdicts-healthy"]
    kinds = {"evaluate": "evaluates", "save": "saves a checkpoint", "compile": "waits for a compiler"}
    lines = []
    for kind, told in kinds.items():
        rows = result.rows("healthy", healthy=kind)
        accused, waited = (sum(row[name] for row in rows) for name in ("false verdicts", "told that others wait"))
        lines.append([f"rank 0 {told}", str(sum(row["runs"] for row in rows)), str(accused), str(waited)])
    heads = ["activity", "runs", "false verdicts", "notices that the others wait (not an error)"]
    return "\n\n".join([markdown(heads, lines), source(result)])


VERDICTS: dict[str, Callable[[Results], str]] = {"verdicts": faults, "verdicts-healthy": healthy}
