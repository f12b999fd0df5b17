"""Defines the content of each block in the documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from publish.elastic_blocks import ELASTIC
from publish.gpu_blocks import GPU
from publish.predicted_blocks import PREDICTED
from publish.readme_blocks import README
from publish.results import Result, Row
from publish.tables import Cell, pivot, ratio, renamed, source, spread, spread_of, table, with_tail
from publish.verdict_blocks import VERDICTS

Results = Mapping[str, Result]
Contestants = Mapping[str, Row]

NAMES = {"unused": "a quarter of the parameters unused"}
_SPREAD = (("minimum", "least"), ("p50", "p50"), ("p95", "p95"))
MPI_LIBRARIES = {"openmpi": "Open MPI", "mpich": "MPICH", "Intel MPI": "Intel MPI"}


def all_reduce(results: Results) -> str:
    result = results["all_reduce"]
    rows = result.rows()
    mpi = next((str(row["by"]) for row in rows if "MPI" in str(row["by"])), None)
    columns = {f"{name} µs": spread(name) for name in ("paceline", "empty_shared", "gloo")}
    columns |= {"gloo / paceline": ratio("gloo", "paceline"), "paceline / shared": ratio("paceline", "empty_shared")}
    if mpi is not None:
        columns |= {f"{mpi} µs": spread(mpi), "MPI / paceline": ratio(mpi, "paceline")}
    return "\n\n".join([pivot(rows, {"ranks": "ranks", "size": "size"}, columns), source(result)])


def training_steps(name: str) -> Callable[[Results], str]:
    """Returns the block for a result of `bench/ddp.py`."""

    def model(row: Row) -> str:
        size = f", {row['params M']:.1f} M" if row["model"] in ("transformer", "wide MLP", "CNN") else ""
        return NAMES.get(row["model"], row["model"]) + size

    def of(contestant: str, column: str) -> Callable[[Contestants], object]:
        return lambda contestants: contestants[contestant][column]

    def block(results: Results) -> str:
        columns = {
            f"{head} ms": spread(kind, "ms")
            for head, kind in (("none", "none"), ("barrier", "barrier"), ("Paceline", "Paceline DDP"))
        }
        columns["torch ms"] = spread("torch DDP", "ms")
        columns["Paceline efficiency"] = of("Paceline DDP", "efficiency")
        columns["torch efficiency"] = of("torch DDP", "efficiency")
        columns["Paceline, of barrier"] = of("Paceline DDP", "of barrier")
        columns["torch, of barrier"] = of("torch DDP", "of barrier")
        return "\n\n".join([pivot(results[name].rows(), {"model": model}, columns, by="step"), source(results[name])])

    return block


def shards(results: Results) -> str:
    columns: dict[str, Cell] = {
        "model": lambda row: f"{row['model']}, {row['params M']:.1f} M",
        "step": "step",
        "n": "n",
        "ms": lambda row: spread_of(row, "ms"),
        "time ratio": "ratio",
        "CPU ms": "CPU ms",
        "CPU time ratio": "CPU ratio",
    }
    return "\n\n".join(
        part
        for name in ("shards", "shards-loaded")
        for part in (table(results[name].rows(), columns), source(results[name]))
    )


def shared_model(name: str) -> Callable[[Results], str]:
    """Returns the block for a result of `bench/shared_model.py`."""

    def block(results: Results) -> str:
        columns: dict[str, Cell] = {
            "model": "model",
            "step": "step",
            "ms": lambda row: spread_of(row, "ms"),
            "speed": "ratio",
        }
        return "\n\n".join([table(results[name].rows(), columns), source(results[name])])

    return block


def engines(results: Results) -> str:
    result = results["engines"]
    names = list(dict.fromkeys(str(row["by"]) for row in result.rows()))
    columns = {f"{name} µs": spread(name) for name in names}
    return "\n\n".join([pivot(result.rows(), {"size": "size"}, columns), source(result)])


def persistent(results: Results) -> str:
    result = results["persistent"]
    names = {
        "plain": "`all_reduce`",
        "persistent": "`all_reduce_init`, called",
        "start and wait": "`all_reduce_init`, `start` and `wait`",
    }
    libraries = MPI_LIBRARIES

    def name(row: Row) -> str:
        library = next((each for each in libraries if str(row["by"]).startswith(each)), None)
        if library is None:
            return names[row["by"]]
        is_persistent = str(row["by"]).endswith(" init")
        calls = "`MPI_Allreduce_init`, `MPI_Start` and `MPI_Wait`" if is_persistent else "`MPI_Allreduce`"
        return f"{libraries[library]}: {calls}"

    rows = result.rows(call="all_reduce", size="4 B")
    columns: dict[str, Cell] = {
        "processes started by": lambda row: libraries.get(row["beside"], "Paceline"),
        "call": name,
        "p50 µs": "p50 µs",
        "p95 µs": "p95 µs",
        "fastest run µs": "fastest µs",
        "p50 / persistent": "p50 / persistent",
    }
    return "\n\n".join([table(rows, columns), source(result)])


def all_reduce_mpi(results: Results) -> str:
    result = results["all_reduce_mpi"]

    def time_of(who: str) -> Cell:
        return lambda row: with_tail(row[f"{who} p50 µs"], row[f"{who} p95 µs"])

    columns: dict[str, Cell] = {
        "size": "size",
        "library": lambda row: MPI_LIBRARIES[row["library"]] + (" (the fastest)" if row.get("fastest") == "*" else ""),
        "library µs": time_of("library"),
        "`all_reduce` µs": time_of("paceline"),
        "`all_reduce_init` µs": time_of("persistent"),
        "library / `all_reduce`": "library / paceline",
        "library / `all_reduce_init`": lambda row: row["library p50 µs"] / row["persistent p50 µs"],
    }
    return "\n\n".join([table(result.rows(), columns), source(result)])


def launch(results: Results) -> str:
    result = results["launch"]
    threads = {"waits": "busy-waits", "sleeps": "sleeps"}
    columns: dict[str, Cell] = {"gap µs": "gap µs", "thread": lambda row: threads[row["thread"]], "n": "n"}
    for head, name in (("call returns", "start"), ("thread begins", "until it runs")):
        columns |= {f"{head}: {of} µs": f"{name} {column} µs" for of, column in _SPREAD}
    return "\n\n".join([table(result.rows(), columns), source(result)])


def many_ranks(results: Results) -> str:
    result = results["many_ranks"]
    names = {
        "last arrival to end of first barrier": "from the arrival of the last rank to the end of the first barrier",
        "every collective, checked": "every collective, with a check of its results",
        "a death until all know": "from a death until all other ranks have raised an error",
        "all have left": "destroying the process group on all ranks",
    }
    columns: dict[str, Cell] = {"measured time": renamed("what", names)}
    columns |= {name: name for name in ("ranks", "n", "p50 s", "max s")}
    return "\n\n".join([table(result.rows(), columns), source(result)])


def plugin(results: Results) -> str:
    result = results["plugin"]
    columns = {
        "paceline µs": spread("paceline"),
        "gloo µs": spread("gloo"),
        "barrier µs": spread("barrier"),
        "gloo / paceline": ratio("gloo", "paceline"),
        "asynchronous, gloo / paceline": ratio("gloo async", "paceline async"),
    }
    return "\n\n".join([pivot(result.rows(), {"": "what"}, columns), source(result)])


def compat(name: str) -> Callable[[Results], str]:
    """Returns the block for a result of `bench/compat.py`."""

    def share(by: str) -> Callable[[Contestants], str]:
        return lambda contestants: f"{contestants[by]['communication']:.0%}"

    columns = {
        "gloo ms": spread("gloo", "ms"),
        "`--compat torch` ms": spread("--compat torch", "ms"),
        "communication, gloo": share("gloo"),
        "communication, `--compat torch`": share("--compat torch"),
        "gloo / `--compat torch`": ratio("gloo", "--compat torch", "ms"),
        "the same, relative to the unwrapped model": lambda contestants: contestants["gloo"]["ratio to bare"],
    }

    def block(results: Results) -> str:
        return "\n\n".join([pivot(results[name].rows(), {"program": "program"}, columns), source(results[name])])

    return block


def store(results: Results) -> str:
    result = results["store"]
    columns: dict[str, Cell] = {"clients": "clients", "operation": "operation"}
    columns |= {name: name for name in ("n", "paceline 1/s", "torch 1/s", "paceline / torch")}
    return "\n\n".join([table(result.rows(), columns), source(result)])


def hosts(name: str, *columns: str) -> Callable[[Results], str]:
    """Returns the block for a result of `bench/hosts.py`; the columns show the parameters that distinguish lines."""
    heads = {"hosts": "hosts × ranks", "delay ms": "one-way delay ms"}

    def of_line(contestant: str) -> Callable[[Contestants], object]:
        def cell(contestants: Contestants) -> object:
            of = contestants[contestant].get("of line")
            return None if contestants[contestant]["size"] == "4 B" else of

        return cell

    def block(results: Results) -> str:
        result = results[name]
        shown = {"paceline µs": spread("paceline"), "gloo µs": spread("gloo")}
        has_flat = any(row["by"] == "flat ring" for row in result.rows())
        if has_flat:
            shown["flat ring µs"] = spread("flat ring")
        shown["gloo / paceline"] = ratio("gloo", "paceline")
        if has_flat:
            shown["flat / paceline"] = ratio("flat ring", "paceline")
        else:
            shown |= {"fraction of line rate": of_line("paceline"), "gloo, fraction of line rate": of_line("gloo")}
        lines: dict[str, Cell] = {heads.get(column, column): column for column in columns}
        return "\n\n".join([pivot(result.rows(), lines, shown), source(result)])

    return block


def wires(results: Results) -> str:
    result = results["hosts-wires"]
    columns: dict[str, Cell] = {
        name: name for name in ("hosts", "rate", "delay ms", "size", "by", "n", "p50 µs", "p95 µs")
    }
    columns |= {"ratio": "ratio", "× line rate": "of line"}
    return "\n\n".join([table(result.rows(), columns), source(result)])


def diloco(results: Results) -> str:
    result = results["diloco"]
    rows = result.rows()
    exact = next(row["held-out loss"] for row in rows if row["method"] == "DDP")
    names = {"alone": "each rank alone", "DDP": "exact data-parallel training"}

    named = renamed("method", names)

    def way(row: Row) -> str:
        name = named(row)
        return name if "fragments" not in row else f"{name}, {row['wire']}, {row['fragments']} fragments"

    def more(row: Row) -> str | None:
        return None if row["method"] == "DDP" else f"{row['held-out loss'] / exact - 1:.1%}"

    columns: dict[str, Cell] = {
        "": way,
        "learning rate": "lr",
        "`every`": lambda row: row.get("every"),
        "`delay`": lambda row: row.get("delay"),
        "held-out loss": lambda row: f"{row['held-out loss']:.3f} ({row['from']:.3f} to {row['to']:.3f})",
        "increase over exact training": more,
        "steps/s": "steps/s",
        "relative to a rank alone": lambda row: row.get("of alone"),
        "share of time waiting": lambda row: f"{row['waited']:.1%}" if "fragments" in row else None,
    }
    return "\n\n".join([table(rows, columns), source(result)])


def encryption(results: Results) -> str:
    result = results["encryption"]

    def time_of(connections: str) -> Cell:
        return lambda row: with_tail(row[f"{connections} µs"], row.get(f"{connections}, p95 µs"))

    columns: dict[str, Cell] = {"rate": "rate", "size": "size"}
    columns |= {f"{name} µs": time_of(name) for name in ("plain", "encrypted")}
    columns |= {name: name for name in ("encrypted / plain", "core, plain µs", "core, encrypted µs")}
    columns["ns per byte"] = lambda row: None if row["size"] == "4 B" else row["ns a byte"]
    return "\n\n".join([table(result.rows(), columns), source(result)])


def schedules(results: Results) -> str:
    result = results["schedules"]
    rows = result.rows(rank=0)
    columns: dict[str, Cell] = {
        "algorithm": "algorithm",
        "steps": "steps",
        "ms": lambda row: spread_of(row, "ms"),
    }
    return "\n\n".join([table(rows, columns), source(result)])


def startup(results: Results) -> str:
    result = results["startup"]
    columns = {"`paceline run` s": spread("paceline run", "s"), "torchrun s": spread("torchrun", "s")}
    columns["torchrun / `paceline run`"] = ratio("torchrun", "paceline run", "s")
    for name in ("paceline run", "torchrun"):
        columns[f"{name} MiB"] = lambda rows, name=name: rows[name].get("MiB")
    events = {"first all-reduce done": "first all-reduce completed", "launcher ended": "launcher exited"}
    lines: dict[str, Cell] = {"ranks": "ranks", "time until": renamed("until", events)}
    return "\n\n".join([pivot(result.rows(), lines, columns), source(result)])


def death(results: Results) -> str:
    result = results["death"]
    names = {
        "ddp": "a training step with `DistributedDataParallel`",
        "asynchronous": "asynchronous all_reduce",
        "groups": "9 groups in rotation",
        "hosts": "two hosts (network namespaces) with two ranks each",
        "late": "ranks that wait for a late rank",
        "gloo": "torch's gloo, all_reduce",
    }
    columns: dict[str, Cell] = {"case": renamed("case", names)}
    columns |= {name: name for name in ("kills", "survivors", "p50 ms", "p95 ms", "p99 ms", "max ms")}
    columns["dead rank identified"] = "named the victim"
    return "\n\n".join([table(result.rows(), columns), source(result)])


BLOCKS: dict[str, Callable[[Results], str]] = {
    "all_reduce": all_reduce,
    "ddp": training_steps("ddp"),
    "ddp-4-ranks": training_steps("ddp-4-ranks"),
    "shards": shards,
    "shared_model": shared_model("shared_model"),
    "shared_model-4-ranks": shared_model("shared_model-4-ranks"),
    "engines": engines,
    "persistent": persistent,
    "all_reduce_mpi": all_reduce_mpi,
    "launch": launch,
    "many_ranks": many_ranks,
    "plugin": plugin,
    "compat": compat("compat"),
    "compat-4-ranks": compat("compat-4-ranks"),
    "store": store,
    "hosts": hosts("hosts", "hosts", "rate", "size"),
    "hosts-delays": hosts("hosts-delays", "delay ms", "size"),
    "hosts-two-ranks": hosts("hosts-two-ranks", "rate", "size"),
    "hosts-wires": wires,
    "diloco": diloco,
    "encryption": encryption,
    "schedules": schedules,
    "startup": startup,
    "death": death,
    **ELASTIC,
    **GPU,
    **PREDICTED,
    **README,
    **VERDICTS,
}
