"""Job metrics for Prometheus (text exposition format 0.0.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from paceline.operate.dashboard.dashboard_state import PARTS, DashboardState, LinkRow, RankRow

_Value = tuple[Mapping[str, str | int], float]

_OF_RANKS: tuple[tuple[str, str, Callable[[RankRow], float]], ...] = (
    ("rank_samples_per_second", "Samples per second of a rank, over its recent steps.", lambda row: row.samples_per_s),
    ("rank_compute_seconds", "Time of a rank's own work in a step, recent mean.", lambda row: row.compute / 1e3),
    ("rank_wait_seconds", "Time that a rank waits for others in a step, recent mean.", lambda row: row.wait / 1e3),
    ("rank_slowness_ratio", "A rank's own time divided by the median of all ranks.", lambda row: row.slowness),
    ("rank_slow", "1 if the rank is slower than the others beyond chance.", lambda row: row.is_slow),
    ("rank_memory_bytes", "A rank's resident memory.", lambda row: row.memory_nbytes),
    ("rank_heard_seconds", "Time since a rank last recorded something.", lambda row: row.heard_s),
    ("rank_blamed", "1 if the diagnosis blames the rank.", lambda row: row.is_blamed),
)

_OF_LINKS: tuple[tuple[str, str, Callable[[LinkRow], float | None]], ...] = (
    ("link_sent_bytes_per_second", "Bytes per second that a rank sends to another one.", lambda row: row.nbytes_per_s),
    ("link_delivery_bytes_per_second", "Latest delivery rate of a link.", lambda row: row.delivers_nbytes_per_s),
    ("link_round_trip_seconds", "Smoothed round trip of a link.", lambda row: _seconds(row.round_trip)),
    ("link_round_trip_variation_seconds", "Variation of the round trip.", lambda row: _seconds(row.variation)),
    ("link_retransmits", "Segments retransmitted so far.", lambda row: row.retransmits),
    ("link_slow", "1 if the link is much slower than the others.", lambda row: row.is_slow),
)


def metrics(state: DashboardState) -> str:
    """Formats the metrics. Each has the label `job`, and per-rank metrics also have `rank` and `host`."""
    job: dict[str, str | int] = {"job": state.header.run_id}
    lines: list[str] = []
    for name, text, values in _families(state):
        if values:
            lines += [f"# HELP paceline_{name} {text}", f"# TYPE paceline_{name} gauge"]
            lines += [f"paceline_{name}{_labels({**job, **labels})} {_number(value)}" for labels, value in values]
    return "\n".join([*lines, ""])


def _families(state: DashboardState) -> Iterator[tuple[str, str, Sequence[_Value]]]:
    header, figures = state.header, state.figures
    yield "ranks", "Ranks that are present.", [({}, header.ranks_here)]
    yield "world_size", "Ranks that the job should have.", [({}, header.world_size)]
    yield "restarts", "Number of restarts of the workers.", [({}, header.restarts)]
    yield "stuck", "1 if a diagnosis explains why the job makes no progress.", [({}, state.verdict is not None)]
    yield "elapsed_seconds", "Time since the job began.", [({}, header.elapsed_s)]
    if header.step is not None:
        yield "step", "Current step of the job.", [({}, header.step)]
    if header.left_s is not None:
        yield "left_seconds", "Estimated time until the last step.", [({}, header.left_s)]
    if figures is not None:
        yield "step_seconds", "Duration of a step, recent mean without stalls.", [({}, figures.step / 1e3)]
        yield "samples_per_second", "Samples per second of all ranks.", [({}, figures.samples_per_s)]
        yield "exposed_ratio", "Share of a step that is spent waiting.", [({}, figures.exposed_share)]
        if figures.overlap is not None:
            yield "overlap_ratio", "Share of the communication that overlaps with other work.", [({}, figures.overlap)]
        parts: list[_Value] = [({"part": part}, time / 1e3) for part, time in zip(PARTS, figures.parts, strict=True)]
        yield "step_part_seconds", "The parts of a step, mean over the ranks.", parts
    for name, text, value in _OF_RANKS:
        yield name, text, [({"rank": row.rank, "host": row.host}, value(row)) for row in state.ranks]
    links = [row for row in state.links if row.peer >= 0]
    for name, text, of in _OF_LINKS:
        yield name, text, [({"rank": row.rank, "peer": row.peer}, v) for row in links if (v := of(row)) is not None]
    latest = {point.name: point.mean for point in state.curves.items}
    yield "logged", "Latest logged value, mean over the ranks.", [({"name": k}, v) for k, v in latest.items()]


def _seconds(time_ms: float | None) -> float | None:
    return None if time_ms is None else time_ms / 1e3


def _labels(labels: Mapping[str, str | int]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else f"{value:.9g}"
