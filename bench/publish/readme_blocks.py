"""Defines the blocks of README.md and README.zh.md: a few figures from the results, in the language of the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from publish.results import Result, Row
from publish.tables import markdown

Results = Mapping[str, Result]


@dataclass(frozen=True)
class Words:
    """The phrases in a language; fields in braces are filled in."""

    four_ranks: str
    steps: str
    torch_ddp: str
    models: tuple[tuple[str, str], ...]
    hosts: str
    two_hosts: str
    two_hosts_at_rate: str
    four_hosts: str
    of_line: str
    of_line_too: str
    others: str


ENGLISH = Words(
    four_ranks="4 KiB, 4 ranks on the 2 cores",
    steps="a training step on 2 single-threaded ranks, relative to its bound¹",
    torch_ddp="torch DDP (gloo)",
    models=(
        ("transformer", "transformer, 6.8 M parameters"),
        ("wide MLP", "wide MLP, 6.3 M"),
        ("CNN", "CNN, 1.1 M"),
        ("200 tiny layers", "200 tiny layers"),
    ),
    hosts="all-reduce between hosts, TCP",
    two_hosts="2 hosts, {size}",
    two_hosts_at_rate="2 hosts at 10 Gbit/s, {size}",
    four_hosts="4 hosts, {size}",
    of_line=" ({of:.0f}% of the line)",
    of_line_too=" ({of:.0f}%)",
    others="With `paceline run`, two ranks finish their first all-reduce after {ours:.1f} s; with torchrun, after "
    "{theirs:.1f} s. Programs\n"
    'that use `torch.distributed` also become faster: with `init_process_group("paceline")`, a 4 B all-reduce is\n'
    "{small:.0f} times as fast as with gloo, a 64 MiB all-reduce is {large:.0f} times as fast, and an FSDP2 step is "
    "{step:.1f} times as fast.",
)

CHINESE = Words(
    four_ranks="4 KiB，4 个进程共用 2 核",
    steps="训练一步与其上限之比¹（2 个单线程进程）",
    torch_ddp="torch DDP（gloo）",
    models=(
        ("transformer", "transformer，680 万参数"),
        ("wide MLP", "宽 MLP，630 万参数"),
        ("CNN", "CNN，110 万参数"),
        ("200 tiny layers", "200 个小层"),
    ),
    hosts="主机间 all-reduce，TCP",
    two_hosts="2 台主机，{size}",
    two_hosts_at_rate="2 台主机，10 Gbit/s，{size}",
    four_hosts="4 台主机，{size}",
    of_line=" (带宽的 {of:.0f}%)",
    of_line_too=" ({of:.0f}%)",
    others="用 `paceline run` 启动时，两个进程在 {ours:.1f} 秒后完成第一次 all-reduce，"
    "用 torchrun 则需 {theirs:.1f} 秒。使用 `torch.distributed` 的程序同样受益：\n"
    '改用 `init_process_group("paceline")` 后，4 B 的 all-reduce 是 gloo 的 {small:.0f} 倍快，'
    "64 MiB 的是 {large:.0f} 倍，FSDP2 的一步是 {step:.1f} 倍。",
)


def all_reduce(words: Words) -> Callable[[Results], str]:
    def block(results: Results) -> str:
        rows = results["all_reduce"].rows()
        mpi = next((str(row["by"]) for row in rows if "MPI" in str(row["by"])), "")
        lines = []
        for ranks, size in ((2, "4 B"), (2, "64 KiB"), (2, "1 MiB"), (2, "64 MiB"), (2, "128 MiB"), (4, "4 KiB")):
            by = {str(row["by"]): row for row in rows if row["ranks"] == ranks and row["size"] == size}
            cells = [_time(by[name]) if name in by else None for name in ("paceline", "empty_shared", "gloo", mpi)]
            lines.append([size if ranks == 2 else words.four_ranks, *cells, _ratio(by["gloo"])])
        heads = ["all-reduce", "Paceline", "`empty_shared`", "torch gloo", mpi, "gloo / Paceline"]
        return markdown(heads, lines)

    return block


def steps(words: Words) -> Callable[[Results], str]:
    def block(results: Results) -> str:
        ddp = results["ddp"]
        lines = [
            [name, *(f"{ddp.row(model=model, step=by)['of barrier']:.2f}" for by in ("Paceline DDP", "torch DDP"))]
            for model, name in words.models
        ]
        return markdown([words.steps, "Paceline", words.torch_ddp], lines)

    return block


def hosts(words: Words) -> Callable[[Results], str]:
    def block(results: Results) -> str:
        shown = (
            ("2x1", "none", "4 KiB", words.two_hosts),
            ("2x1", "none", "64 MiB", words.two_hosts),
            ("2x1", "10gbit", "64 MiB", words.two_hosts_at_rate),
            ("4x1", "none", "64 MiB", words.four_hosts),
        )
        lines = []
        for where, rate, size, name in shown:
            found = {row["by"]: row for row in results["hosts"].rows(hosts=where, rate=rate, size=size)}
            ours, theirs = found["paceline"], found["gloo"]
            cells = [_time(ours) + _of_line(ours, words.of_line), _time(theirs) + _of_line(theirs, words.of_line_too)]
            lines.append([name.format(size=size), *cells, _ratio(theirs)])
        return markdown([words.hosts, "Paceline", "torch gloo", "gloo / Paceline"], lines)

    return block


def others(words: Words) -> Callable[[Results], str]:
    def block(results: Results) -> str:
        first = {row["by"]: row for row in results["startup"].rows(ranks=2, until="first all-reduce done")}
        plugin = {what: results["plugin"].row(what=what, by="gloo")["ratio"] for what in _OF_PLUGIN}
        small, large, step = plugin.values()
        ours, theirs = first["paceline run"]["p50 s"], first["torchrun"]["p50 s"]
        return words.others.format(ours=ours, theirs=theirs, small=small, large=large, step=step)

    return block


_OF_PLUGIN = ("all_reduce of 4 B", "all_reduce of 64 MiB", "a step of FSDP2")


def _time(row: Row) -> str:
    value, unit = (row["p50 µs"], "µs") if row["p50 µs"] < 2000 else (row["p50 µs"] / 1000, "ms")
    return f"{value:.1f} {unit}" if value < 10 else f"{value:,.0f} {unit}"


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.1f}" if row["ratio"] < 10 else f"{row['ratio']:.0f}"


def _of_line(row: Row, words: str) -> str:
    return "" if row.get("of line") is None else words.format(of=100 * row["of line"])


README: dict[str, Callable[[Results], str]] = {
    f"readme-{name}{suffix}": made(words)
    for name, made in (("all_reduce", all_reduce), ("steps", steps), ("hosts", hosts), ("others", others))
    for suffix, words in (("", ENGLISH), (".zh", CHINESE))
}
