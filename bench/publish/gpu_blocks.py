"""Defines the blocks of docs/gpu.md: the results of each step of `bench/gpu.py` by device, and the speed of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from publish.results import Result, Row
from publish.tables import Cell, markdown, source, table

Results = Mapping[str, Result]

_RUNS = {"gpu-cpu": "CPU", "gpu-fake": "fake device"}
_GPU = "gpu"
_COLLAPSED = ("health", "collectives", "streams", "checkpoint", "CUDA_LAUNCH_BLOCKING=1", "staged", "tests/gpu")
"""Sections that are summarized in one line."""


def _columns(results: Results) -> dict[str, Result]:
    """Returns the results by column header."""
    found = {head: results[name] for name, head in _RUNS.items() if name in results}
    if _GPU in results:
        found[_name_of_gpu(results[_GPU])] = results[_GPU]
    return found


def _name_of_gpu(result: Result) -> str:
    return str(next((row["value"] for row in result.rows("machine") if row["fact"] == "GPU"), "GPU"))


def _lines(columns: Mapping[str, Result]) -> Iterator[tuple[str, list[str]]]:
    """Yields the name of each line and the steps that it summarizes."""
    names = list(dict.fromkeys(row["step"] for result in columns.values() for row in result.rows("steps")))
    sections: dict[str, list[str]] = {}
    for name in names:
        sections.setdefault(name.partition(":")[0], []).append(name)
    for section, own in sections.items():
        if section in _COLLAPSED:
            yield f"`{section}`", own
        else:
            for name in own:
                yield f"`{name}`", [name]


def _cell(result: Result, names: Sequence[str]) -> str:
    """Returns "ok", "failed", the number of steps that passed if there are several, or "-" if none ran."""
    rows = [row for row in result.rows("steps") if row["step"] in names and row["result"] != "left out"]
    right = sum(row["result"] == "ok" for row in rows)
    if not rows:
        return "-"
    if len(names) == 1:
        return "ok" if right else "failed"
    return f"{right} / {len(rows)}"


def steps(results: Results) -> str:
    """Returns a table of all steps, and the errors of the failed steps."""
    columns = _columns(results)
    lines = [[name, *(_cell(result, own) for result in columns.values())] for name, own in _lines(columns)]
    parts = [markdown(["", *columns], lines)]
    failed = [
        f"- `{row['step']}`, {head}: {_plain(row['error'])}"
        for head, result in columns.items()
        for row in result.rows("steps")
        if row["result"] in ("failed", "timeout")
    ]
    if failed:
        parts.append("\n".join(failed))
    return "\n\n".join([*parts, source(*columns.values())])


def _plain(error: str) -> str:
    """Returns an error formatted as code on one line."""
    return f"`{error.replace('`', chr(39))}`"


def _of_case(block_name: str, case: str, columns: Mapping[str, Cell]) -> Callable[[Results], str]:
    """Returns a function that makes a case's block from the run of all steps or, failing that, of the speed steps."""

    def block(results: Results) -> str:
        found = [results[name] for name in (_GPU, "gpu-speed") if name in results and _has(results[name], case)]
        if not found:
            raise KeyError(f"a page has figures of {block_name}, and neither gpu.json nor gpu-speed.json has {case!r}")
        result = found[0]
        return "\n\n".join([table(result.rows(case), columns), source(result)])

    return block


def _has(result: Result, case: str) -> bool:
    return any(each.case == case for each in result.tables)


def _size(row: Row) -> str:
    nbytes = int(row["bytes"])
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def _columns_of_both(**columns: Cell) -> dict[str, Cell]:
    return {**columns, "Paceline µs": "paceline µs", "torch µs": "torch µs"}


_RATIO = {"torch / Paceline": "ratio"}
GPU: dict[str, Callable[[Results], str]] = {
    "gpu": steps,
    "gpu-all_reduce": _of_case(
        "gpu-all_reduce",
        "all_reduce",
        _columns_of_both(ranks="ranks", size=_size)
        | {"Paceline GB/s": "paceline GB/s", "torch GB/s": "torch GB/s"}
        | _RATIO,
    ),
    "gpu-host": _of_case("gpu-host", "host time", _columns_of_both(ranks="ranks", call="call") | _RATIO),
    "gpu-memory": _of_case(
        "gpu-memory",
        "memory of a group",
        {"library": "by", "ranks": "ranks", "MiB per rank": "MiB of a rank", "first call ms": "first call ms"},
    ),
    "gpu-step": _of_case(
        "gpu-step",
        "training step",
        {
            "GPU": "GPU",
            "million parameters": "params M",
            "no DDP ms": "none ms",
            "Paceline ms": "paceline ms",
            "torch ms": "torch ms",
            **_RATIO,
        },
    ),
}
