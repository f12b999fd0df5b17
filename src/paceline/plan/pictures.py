"""The pictures of a plan's report, as SVG: the scaling curve, where a step's time goes, and a map of rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from paceline.plan.predicting import Prediction
from paceline.schedule.cost import spell_seconds

PARTS = (
    ("data", "data"),
    ("forward", "forward"),
    ("backward", "backward"),
    ("exposed", "exposed communication"),
    ("optimizer", "optimizer"),
    ("other", "rest"),
)
"""The parts of a step: the colour's name in the page's style, and what the part is called."""

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 40


@dataclass(frozen=True)
class HeatRow:
    """The efficiencies of one number of nodes, one for each rate of the links between hosts."""

    nodes: int
    efficiencies: tuple[float, ...]


def scaling_curve(predictions: Sequence[Prediction]) -> str:
    """Returns the rate by the number of ranks on two logarithmic axes, with its band and what would be ideal."""
    ranks = [each.ranks for each in predictions]
    rates = [each.ranks / each.step.seconds for each in predictions]
    ideal = [each.ranks / each.alone_s for each in predictions]
    low = [each.ranks / each.high_s for each in predictions]
    high = [each.ranks / each.low_s for each in predictions]
    unit = predictions[0].samples_per_s is not None
    if unit:
        scale = [(each.samples_per_s or 0.0) / rate for each, rate in zip(predictions, rates, strict=True)]
        rates, ideal, low, high = (
            [value * by for value, by in zip(values, scale, strict=True)] for values in (rates, ideal, low, high)
        )
    across = _Axis(ranks, _LEFT, _WIDTH - _RIGHT)
    up = _Axis([*ideal, *low, *high], _HEIGHT - _BOTTOM, _TOP)
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
    for each, rate in zip(predictions, rates, strict=True):
        drawn.append(
            f'<circle cx="{across.place(each.ranks):.1f}" cy="{up.place(rate):.1f}" r="4" fill="var(--backward)">'
            f"<title>{each.nodes} nodes: {_short(rate)} {'samples/s' if unit else 'steps of a rank/s'}</title></circle>"
        )
    name = "samples a second" if unit else "steps of all ranks a second"
    return _svg(_HEIGHT, f"{name} by the number of ranks; dashed: without waiting", drawn)


def step_bars(predictions: Sequence[Prediction]) -> str:
    """Returns a bar for each number of nodes, divided into the parts of a step."""
    longest = max(each.step.seconds for each in predictions)
    height = _TOP + 34 * len(predictions) + 34
    room = _WIDTH - _LEFT - 90
    drawn = []
    for row, each in enumerate(predictions):
        top, left = _TOP + 34 * row, float(_LEFT)
        drawn.append(_text(_LEFT - 8, top + 16, str(each.nodes), "end"))
        for (colour, name), seconds in zip(PARTS, _parts(each), strict=True):
            width = room * seconds / longest
            drawn.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="22" fill="var(--{colour})">'
                f"<title>{name}: {spell_seconds(seconds)}</title></rect>"
            )
            left += width
        drawn.append(_text(left + 6, top + 16, spell_seconds(each.step.seconds)))
    at = float(_LEFT)
    for colour, name in PARTS:
        drawn.append(f'<rect x="{at:.0f}" y="{height - 20}" width="10" height="10" fill="var(--{colour})"/>')
        drawn.append(_text(at + 14, height - 11, name))
        at += 24 + 6.6 * len(name)
    return _svg(height, "the parts of a step, by the number of nodes", drawn)


def heat_map(rows: Sequence[HeatRow], rates: Sequence[str]) -> str:
    """Returns the efficiency by the number of nodes and the rate of the links between hosts."""
    height = _TOP + 30 * len(rows) + 34
    width = (_WIDTH - _LEFT - _RIGHT) / len(rates)
    drawn = []
    for at, row in enumerate(rows):
        top = _TOP + 30 * at
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


def _parts(prediction: Prediction) -> tuple[float, ...]:
    step = prediction.step
    return (step.data_s, step.forward_s, step.backward_s, step.exposed_s, step.optimizer_s, step.rest_s)


class _Axis:
    """A logarithmic axis between two places of the picture."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        self._low, self._high = min(values), max(values)
        self._first, self._last = first, last

    def place(self, value: float) -> float:
        """Returns where a value is."""
        if self._high <= self._low:
            return (self._first + self._last) / 2
        share = math.log(value / self._low) / math.log(self._high / self._low)
        return self._first + share * (self._last - self._first)

    def ticks(self) -> list[float]:
        """Returns up to five values from the least to the largest."""
        if self._high <= self._low:
            return [self._low]
        return [self._low * (self._high / self._low) ** (at / 4) for at in range(5)]


def _points(values: Sequence[tuple[float, float]], across: _Axis, up: _Axis) -> str:
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
