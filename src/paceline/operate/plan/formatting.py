"""Predictions as text tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.schedule.algorithms import format_seconds
from paceline.operate.plan.prediction import PER_SAMPLES, Advice, JobPrediction

_HEADS = (
    "nodes", "ranks", "step", "p5-p95", "samples/s", "efficiency", "memory", "bottleneck", "algorithm", "traffic",
    "hidden", "node-hours",
)  # fmt: skip


def table_text(predictions: Sequence[JobPrediction]) -> str:
    """Formats predictions as a table with one row per prediction, followed by an explanation of the columns."""
    rows = [_HEADS, *(_cells(prediction) for prediction in predictions)]
    per = f"{PER_SAMPLES:,} samples" if predictions[0].samples_per_s is not None else "1,000 steps"
    notes = (
        "efficiency: relative to the same number of ranks that never wait; memory: per rank; traffic: sent by a host "
        "per step;\n"
        f"hidden: the share of communication that overlaps with computing; node-hours: for {per}\n"
        "\n"
        f"{_unknowns(predictions[-1])}"
    )
    return f"{aligned(rows)}\n\n{notes}\n"


def _unknowns(prediction: JobPrediction) -> str:
    """Explains the interval of a prediction, and which parts of it are assumed."""
    parts = {
        "the measured variation between steps": prediction.variation,
        "this machine's noise between runs, which is unknown and therefore assumed": prediction.machine,
        "the network and its calls, whose prediction errors are unknown; those found by bench/plan.py are assumed":
            prediction.network,
    }  # fmt: skip
    lines = [f"  -{part.less:.0%} +{part.more:.0%}  {name}" for name, part in parts.items()]
    return (
        f"p5-p95: the range of 90% of the steps. On {prediction.nodes} nodes, it consists of\n"
        + "\n".join(lines)
        + "\nSlower or busier machines and other network traffic are not taken into account."
    )


def advice_text(nodes: int, advice: Sequence[Advice]) -> str:
    """Formats changes to a job on `nodes` nodes as a table, largest gain first."""
    if not advice:
        return f"On {nodes} nodes, none of the changes that were tried gains 1% or saves memory.\n"
    rows = [("change", "rate", "step", "memory per rank", "but")]
    for sentence in advice:
        saved = sentence.saved_nbytes
        rows.append(
            (
                sentence.change.what,
                f"{sentence.gain:+.0%}",
                format_seconds(sentence.prediction.step.seconds),
                format_bytes(sentence.prediction.memory.nbytes) + (f" (-{format_bytes(saved)})" if saved > 0 else ""),
                sentence.change.but,
            )
        )
    return f"Possible changes on {nodes} nodes, each predicted separately:\n\n{aligned(rows, left=(0, 4))}\n"


def facts_of(prediction: JobPrediction) -> dict[str, object]:
    """Converts a prediction to a JSON object; each key ends with its unit."""
    step, memory, strategy = prediction.step, prediction.memory, prediction.strategy
    return {
        "nodes": prediction.nodes,
        "ranks_per_node": prediction.per_node,
        "step_s": step.seconds,
        "step_p5_s": prediction.low_s,
        "step_p95_s": prediction.high_s,
        "deviations": {
            "variation": vars(prediction.variation),
            "machine": vars(prediction.machine),
            "network": vars(prediction.network),
        },
        "samples_per_s": prediction.samples_per_s,
        "efficiency": prediction.efficiency,
        "parts_s": {
            "data": step.data_s,
            "forward": step.forward_s,
            "backward": step.backward_s,
            "exposed_communication": step.exposed_s,
            "optimizer": step.optimizer_s,
            "rest": step.rest_s,
        },
        "communication_s": step.communication_s,
        "hidden_share": step.overlap,
        "algorithm": step.algorithm,
        "bottleneck": prediction.bottleneck or None,
        "memory_nbytes": {**vars(memory), "all": memory.nbytes},
        "traffic_of_a_node_nbytes": prediction.traffic_nbytes,
        "node_hours": prediction.node_hours,
        "strategy": {**vars(strategy)},
    }


def facts_of_advice(advice: Advice) -> dict[str, object]:
    """Converts advice to a JSON object."""
    return {
        "change": advice.change.what,
        "but": advice.change.but,
        "gain": advice.gain,
        "saved_nbytes": advice.saved_nbytes,
        "prediction": facts_of(advice.prediction),
    }


def format_bytes(nbytes: float) -> str:
    """Formats a size with its unit: `512 B`, `1.5 MiB`, `2.25 GiB`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:,.3g} GiB" if value < 1000 else f"{value:,.0f} GiB"


def _cells(prediction: JobPrediction) -> tuple[str, ...]:
    step, rate = prediction.step, prediction.samples_per_s
    return (
        str(prediction.nodes),
        str(prediction.ranks),
        format_seconds(step.seconds),
        f"{format_seconds(prediction.low_s)} - {format_seconds(prediction.high_s)}",
        "-" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
        f"{prediction.efficiency:.0%}",
        format_bytes(prediction.memory.nbytes),
        prediction.bottleneck,
        step.algorithm,
        format_bytes(prediction.traffic_nbytes),
        f"{step.overlap:.0%}",
        f"{prediction.node_hours:.3g}",
    )


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    """Formats rows of cells in columns; columns are right-aligned except those listed in `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
