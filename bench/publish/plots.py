"""Draws the pictures of results; each picture is a function from results to SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from publish.canvas import AMBER, BLUE, GRAY, GREEN, VIOLET, Axes, bars, picture
from publish.results import Result, Row

Results = Mapping[str, Result]

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
_COLORS = {"paceline": BLUE, "empty_shared": VIOLET, "gloo": AMBER, "flat ring": VIOLET}


def all_reduce(results: Results) -> str:
    rows = results["all_reduce"].rows()
    ranks = list(dict.fromkeys(row["ranks"] for row in rows))

    def paint(axes: Sequence[Axes]) -> None:
        for axis, count in zip(axes, ranks, strict=True):
            _by_size(axis, [row for row in rows if row["ranks"] == count], f"{count} ranks on 2 cores")

    return picture("Time of an all-reduce by size, on one host", len(ranks), paint)


def between_hosts(results: Results) -> str:
    rows = [row for row in results["hosts"].rows() if row["hosts"] == "2x1"]
    names = {"none": "2 hosts, no bound on the rate", "10gbit": "2 hosts, 10 Gbit/s", "1gbit": "2 hosts, 1 Gbit/s"}

    def paint(axes: Sequence[Axes]) -> None:
        for axis, (rate, title) in zip(axes, names.items(), strict=True):
            _by_size(axis, [row for row in rows if row["rate"] == rate], title)

    return picture("Time of an all-reduce by size, between hosts", len(names), paint, width=9.0)


def _by_size(axis: Axes, rows: Sequence[Row], title: str) -> None:
    """Draws a line for each contestant, and the range up to the 95th percentile if it is known."""
    for name in dict.fromkeys(str(row["by"]) for row in rows):
        mine = [row for row in rows if row["by"] == name]
        sizes = [_nbytes(row["size"]) for row in mine]
        medians = [row["p50 µs"] for row in mine]
        color = _COLORS.get(name, GREEN)
        axis.plot(sizes, medians, marker="o", markersize=3, linewidth=1.5, color=color, label=name)
        tails = [row["p95 µs"] for row in mine]
        if None not in tails:
            axis.fill_between(sizes, medians, tails, color=color, alpha=0.2, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    all_sizes = sorted({_nbytes(row["size"]) for row in rows})
    sizes = [size for at, size in enumerate(all_sizes) if at == 0 or size >= 4 * all_sizes[at - 1]]  # space for a label
    axis.set_xticks(sizes, [_short(size) for size in sizes], rotation=45)
    axis.minorticks_off()
    axis.set_ylabel("µs")
    axis.set_title(title)
    axis.legend(fontsize=8)


def _nbytes(size: str) -> int:
    count, unit = size.split()
    return int(count) * _UNITS[unit]


def _short(nbytes: int) -> str:
    unit, size = next((unit, size) for unit, size in reversed(_UNITS.items()) if nbytes >= size)
    return f"{nbytes // size} {unit}"


def training_steps(results: Results) -> str:
    names = {"ddp": "2 ranks on 2 cores", "ddp-4-ranks": "4 ranks on 2 cores"}
    colors = {"Paceline DDP": BLUE, "torch DDP": AMBER}

    def paint(axes: Sequence[Axes]) -> None:
        for axis, (name, title) in zip(axes, names.items(), strict=True):
            rows = results[name].rows()
            models = list(dict.fromkeys(str(row["model"]) for row in rows))
            series = {
                kind: (color, [_value(rows, "of barrier", model=model, step=kind) for model in models])
                for kind, color in colors.items()
            }
            bars(axis, [model.replace(" ", "\n", 1) for model in models], series, "step with a bare barrier / step")
            axis.set_ylim(0, 1.1)
            axis.set_xlabel(title)

    return picture("A training step against one with a bare barrier", len(names), paint, width=9.0)


def one_copy(results: Results) -> str:
    rows = results["shared_model"].rows()
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    colors = {"barrier": GRAY, "one": BLUE, "Paceline": VIOLET, "torch": AMBER}

    def paint(axes: Sequence[Axes]) -> None:
        for axis, model in zip(axes, models, strict=True):
            mine = [row for row in rows if row["model"] == model]
            places = range(len(mine))
            medians = [row["p50 ms"] for row in mine]
            tails = [row["p95 ms"] - row["p50 ms"] for row in mine]
            color = [colors[str(row["step"]).replace(",", "").split()[0]] for row in mine]
            axis.barh(places, medians, xerr=[[0] * len(mine), tails], color=color, error_kw={"ecolor": GRAY})
            axis.set_yticks(places, [str(row["step"]) for row in mine])
            axis.invert_yaxis()
            axis.grid(False, axis="y")
            axis.set_xlabel("ms a step: median and 95th percentile")
            axis.set_title(model)

    return picture("A step with one copy of the model on a host, and its peers", len(models), paint, width=9.0)


def deaths(results: Results) -> str:
    rows = results["death"].rows()
    colors = {"p50 ms": BLUE, "p95 ms": VIOLET, "p99 ms": AMBER}

    def paint(axes: Sequence[Axes]) -> None:
        series = {name.split()[0]: (color, [row[name] for row in rows]) for name, color in colors.items()}
        bars(axes[0], [str(row["case"]) for row in rows], series, "ms from SIGKILL to the error")

    return picture("Time from a rank's death to the error in each survivor", 1, paint)


def _value(rows: Sequence[Row], column: str, **values: object) -> float | None:
    found = [row for row in rows if all(row.get(name) == value for name, value in values.items())]
    return found[0].get(column) if found else None


PICTURES: dict[str, Callable[[Results], str]] = {
    "figures-all-reduce.svg": all_reduce,
    "figures-hosts.svg": between_hosts,
    "figures-training-steps.svg": training_steps,
    "figures-one-copy.svg": one_copy,
    "figures-deaths.svg": deaths,
}
