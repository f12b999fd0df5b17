"""Plan report: one self-contained HTML file in the style of `paceline report`, with SVG figures."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from paceline.comm.schedule.algorithms import format_seconds
from paceline.comm.schedule.network import NetworkLink
from paceline.operate.dashboard.report import assets
from paceline.operate.plan.calibration import Calibration, network_of, with_rate
from paceline.operate.plan.formatting import format_bytes
from paceline.operate.plan.prediction import Advice, JobPrediction, predict
from paceline.operate.plan.step_time import Simulate

PARTS = (
    ("data", "data"),
    ("forward", "forward"),
    ("backward", "backward"),
    ("exposed", "exposed communication"),
    ("optimizer", "optimizer"),
    ("other", "rest"),
)
"""The parts of a step, each with the name of its color in the page's style sheet."""

RATES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The link rates between hosts shown in the heat map, as multiples of the calibrated rate."""

_PREDICTED = (
    "nodes", "ranks", "step", "p5", "p95", "samples/s", "efficiency", "memory per rank", "bottleneck", "algorithm",
    "traffic per node", "hidden", "node-hours",
)  # fmt: skip

_STYLE = """
svg { width: 100%; max-width: 860px; height: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: 3px 8px; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, td:nth-child(5):last-child { text-align: left; }
td { white-space: normal; }
.card { overflow-x: auto; }
main { display: block; }
main > section { margin: 0 0 14px; }
"""

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 40


@dataclass(frozen=True)
class HeatRow:
    """A row of the heat map: the efficiency on `nodes` nodes for each rate of the links between hosts."""

    nodes: int
    efficiencies: tuple[float, ...]


def scaling_curve(predictions: Sequence[JobPrediction]) -> str:
    """Returns a log-log chart of the rate against the number of ranks, with the predicted interval and ideal rate."""
    ranks = [job.ranks for job in predictions]
    rates = [job.ranks / job.step.seconds for job in predictions]
    ideal = [job.ranks / job.alone_s for job in predictions]
    low = [job.ranks / job.high_s for job in predictions]
    high = [job.ranks / job.low_s for job in predictions]
    unit = predictions[0].samples_per_s is not None
    if unit:
        scale = [(job.samples_per_s or 0.0) / rate for job, rate in zip(predictions, rates, strict=True)]
        rates, ideal, low, high = (
            [value * by for value, by in zip(values, scale, strict=True)] for values in (rates, ideal, low, high)
        )
    across = _LogAxis(ranks, _LEFT, _WIDTH - _RIGHT)
    up = _LogAxis([*ideal, *low, *high], _HEIGHT - _BOTTOM, _TOP)
    band = [*zip(ranks, high, strict=True), *reversed(list(zip(ranks, low, strict=True)))]
    drawn = [
        *(_tick_across(across.place(value), str(value)) for value in ranks),
        *(_tick_up(up.place(value), _short(value)) for value in up.ticks()),
        f'<polygon points="{_points(band, across, up)}" fill="var(--forward)" opacity="0.35"/>',
        f'<polyline points="{_points(list(zip(ranks, ideal, strict=True)), across, up)}" fill="none" '
        'stroke="var(--quiet)" stroke-dasharray="5 4"/>',
        f'<polyline points="{_points(list(zip(ranks, rates, strict=True)), across, up)}" fill="none" '
        'stroke="var(--backward)" stroke-width="2"/>',
    ]
    for job, rate in zip(predictions, rates, strict=True):
        drawn.append(
            f'<circle cx="{across.place(job.ranks):.1f}" cy="{up.place(rate):.1f}" r="4" fill="var(--backward)">'
            f"<title>{job.nodes} nodes: {_short(rate)} {'samples/s' if unit else 'steps of a rank/s'}</title></circle>"
        )
    name = "samples per second" if unit else "steps of all ranks per second"
    return _svg(_HEIGHT, f"{name} by the number of ranks; dashed: if ranks never waited", drawn)


def step_bars(predictions: Sequence[JobPrediction]) -> str:
    """Returns a stacked bar chart with the parts of a step for each number of nodes."""
    longest = max(job.step.seconds for job in predictions)
    height = _TOP + 34 * len(predictions) + 34
    room = _WIDTH - _LEFT - 90
    drawn = []
    for row, job in enumerate(predictions):
        top, left = _TOP + 34 * row, float(_LEFT)
        drawn.append(_text(_LEFT - 8, top + 16, str(job.nodes), "end"))
        for (color, name), seconds in zip(PARTS, _parts(job), strict=True):
            width = room * seconds / longest
            drawn.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="22" fill="var(--{color})">'
                f"<title>{name}: {format_seconds(seconds)}</title></rect>"
            )
            left += width
        drawn.append(_text(left + 6, top + 16, format_seconds(job.step.seconds)))
    x = float(_LEFT)
    for color, name in PARTS:
        drawn.append(f'<rect x="{x:.0f}" y="{height - 20}" width="10" height="10" fill="var(--{color})"/>')
        drawn.append(_text(x + 14, height - 11, name))
        x += 24 + 6.6 * len(name)
    return _svg(height, "the parts of a step, by the number of nodes", drawn)


def heat_map(rows: Sequence[HeatRow], rates: Sequence[str]) -> str:
    """Returns a heat map of the efficiency by the number of nodes and the rate of the links between hosts."""
    height = _TOP + 30 * len(rows) + 34
    width = (_WIDTH - _LEFT - _RIGHT) / len(rates)
    drawn = []
    for number, row in enumerate(rows):
        top = _TOP + 30 * number
        drawn.append(_text(_LEFT - 8, top + 19, str(row.nodes), "end"))
        for column, value in enumerate(row.efficiencies):
            left = _LEFT + column * width
            share = round(100 * max(0.0, min(1.0, 1 - value)))
            drawn.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width - 2:.1f}" height="28" '
                f'fill="color-mix(in srgb, var(--heat-1) {share}%, var(--heat-0))"/>'
            )
            drawn.append(_text(left + width / 2, top + 19, f"{value:.0%}", "middle"))
    for column, rate in enumerate(rates):
        drawn.append(_text(_LEFT + (column + 0.5) * width, height - 14, rate, "middle"))
    return _svg(height, "efficiency by the number of nodes and the rate of a host's link", drawn)


def _parts(prediction: JobPrediction) -> tuple[float, ...]:
    step = prediction.step
    return (step.data_s, step.forward_s, step.backward_s, step.exposed_s, step.optimizer_s, step.rest_s)


class _LogAxis:
    """A logarithmic axis between two coordinates of the figure."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        self._low, self._high = min(values), max(values)
        self._first, self._last = first, last

    def place(self, value: float) -> float:
        """Returns the coordinate of a value."""
        if self._high <= self._low:
            return (self._first + self._last) / 2
        share = math.log(value / self._low) / math.log(self._high / self._low)
        return self._first + share * (self._last - self._first)

    def ticks(self) -> list[float]:
        """Returns up to five tick values, from the smallest to the largest."""
        if self._high <= self._low:
            return [self._low]
        return [self._low * (self._high / self._low) ** (quarter / 4) for quarter in range(5)]


def _points(values: Sequence[tuple[float, float]], across: _LogAxis, up: _LogAxis) -> str:
    return " ".join(f"{across.place(x):.1f},{up.place(y):.1f}" for x, y in values)


def _tick_across(x: float, text: str) -> str:
    line = f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="var(--line)"/>'
    return line + _text(x, _HEIGHT - _BOTTOM + 18, text, "middle")


def _tick_up(y: float, text: str) -> str:
    line = f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="var(--line)"/>'
    return line + _text(_LEFT - 8, y + 4, text, "end")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="11" fill="currentColor">{escape(text)}</text>'
    )


def _svg(height: int, label: str, drawn: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(drawn)}</svg>'


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def report(
    calibration: Calibration,
    predictions: Sequence[JobPrediction],
    advice: Sequence[Advice],
    heat: Sequence[HeatRow],
    made: str,
) -> bytes:
    """Returns the HTML page.

    Args:
        calibration: the measurements.
        predictions: one prediction for each number of nodes.
        advice: the advice for the last prediction.
        heat: the result of `heat_of`; empty if all ranks are on one host.
        made: the date and origin of the report, shown in the footer.
    """
    style = assets()["page.css"].decode() + _STYLE
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    title = " ".join(calibration.origin.command) or "a script"
    sections = [
        _section("Rate by the number of ranks", scaling_curve(predictions)),
        _section("Where a step's time goes, by the number of nodes", step_bars(predictions)),
    ]
    if heat:
        drawn = heat_map(heat, _rates(calibration))
        sections.append(_section("Efficiency by the number of nodes and the rate of a host's link", drawn))
    sections += [
        _section("Predictions", _table(_PREDICTED, [_cells(prediction) for prediction in predictions])),
        _section(f"What to change on {predictions[-1].nodes} nodes", _advice(advice)),
        _section("What was measured", _table(("", ""), _facts(calibration))),
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Plan of {escape(title)}</title>\n'
        f'<meta http-equiv="content-security-policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{style}</style>\n</head>\n<body>\n'
        f'<header class="top"><h1>Plan of <code>{escape(title)}</code></h1></header>\n<main>\n'
        f'{"".join(sections)}</main>\n<footer class="quiet">{escape(made)}</footer>\n</body>\n</html>\n'
    ).encode()


def heat_of(
    calibration: Calibration, predictions: Sequence[JobPrediction], simulate: Simulate, regions: int = 1
) -> list[HeatRow]:
    """Predicts the jobs' efficiencies for other link rates between hosts."""
    rows = []
    for job in predictions:
        if job.nodes == 1:
            continue
        row = []
        for times in RATES:
            links = with_rate(calibration.links, times)
            network = network_of(links, job.nodes, job.per_node, min(regions, job.nodes))
            row.append(predict(calibration, network, job.strategy, simulate, explains=False).efficiency)
        rows.append(HeatRow(job.nodes, tuple(row)))
    return rows


def _cells(each: JobPrediction) -> tuple[str, ...]:
    return (
        f"{each.nodes:,}",
        f"{each.ranks:,}",
        format_seconds(each.step.seconds),
        format_seconds(each.low_s),
        format_seconds(each.high_s),
        "-" if each.samples_per_s is None else f"{each.samples_per_s:,.0f}",
        f"{each.efficiency:.0%}",
        format_bytes(each.memory.nbytes),
        each.bottleneck,
        each.step.algorithm,
        format_bytes(each.traffic_nbytes),
        f"{each.step.overlap:.0%}",
        f"{each.node_hours:.3g}",
    )


def _advice(advice: Sequence[Advice]) -> str:
    if not advice:
        return "<p>None of the changes that were tried gains 1% or saves memory.</p>"
    rows = [
        (
            sentence.change.what,
            f"{sentence.gain:+.0%}",
            format_seconds(sentence.prediction.step.seconds),
            format_bytes(sentence.prediction.memory.nbytes),
            sentence.change.but,
        )
        for sentence in advice
    ]
    return _table(("change", "rate", "step", "memory per rank", "but"), rows)


def _facts(calibration: Calibration) -> list[tuple[str, str]]:
    origin, times, links = calibration.origin, calibration.times, calibration.links
    known = [("within a host", links.within_host), ("of a host", links.node), ("of a region", links.region)]
    return [
        ("measured on", f"{origin.host}, {origin.date}, {origin.cores} cores, {origin.threads} threads"),
        ("ranks that ran at the same time", str(origin.together)),
        ("step", f"{format_seconds(calibration.alone_s)}, {len(calibration.step_s)} steps"),
        ("forward", format_seconds(times.forward_s)),
        ("backward", format_seconds(times.backward_s)),
        ("optimizer", format_seconds(times.optimizer_s)),
        ("gradients", f"{len(calibration.gradients)}, {format_bytes(calibration.gradient_nbytes)}"),
        *((f"link {name}", _link(link)) for name, link in known if link is not None),
    ]


def _link(link: NetworkLink) -> str:
    loss = f", {link.loss:.2%} lost" if link.loss else ""
    return f"{format_seconds(link.latency_s)}, {8 * link.bytes_per_s / 1e9:.3g} Gbit/s{loss}"


def _rates(calibration: Calibration) -> list[str]:
    node = calibration.links.node
    known = 8 * node.bytes_per_s / 1e9 if node is not None else 1.0
    return [f"{known * times:.3g} Gbit/s" for times in RATES]


def _section(title: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>\n'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(header)}</th>" for header in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
