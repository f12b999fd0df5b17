"""The report of a plan: one file of HTML that needs nothing else, in the style of `paceline report`."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape

from paceline.observe.live.assets import assets
from paceline.plan.advice import Advice
from paceline.plan.calibration import Calibration
from paceline.plan.collectives import Simulate
from paceline.plan.networks import network_of, with_rate
from paceline.plan.pictures import HeatRow, heat_map, scaling_curve, step_bars
from paceline.plan.predicting import Prediction, predict
from paceline.plan.spelling import spell_bytes
from paceline.schedule.cost import spell_seconds
from paceline.schedule.network import Link

RATES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The rates of the links between hosts on the map, as multiples of the known one."""

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


def report(
    calibration: Calibration,
    predictions: Sequence[Prediction],
    advice: Sequence[Advice],
    heat: Sequence[HeatRow],
    made: str,
) -> bytes:
    """Returns the page.

    Args:
        calibration: what the predictions are made from.
        predictions: one for each number of nodes.
        advice: for the last of them.
        heat: what `heat_of` returned; empty where all ranks are on one host.
        made: when and by what the report was made, for its foot.
    """
    style = assets()["page.css"].decode() + _STYLE
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    title = " ".join(calibration.origin.command) or "a script"
    sections = [
        _section("How the rate grows with the ranks", scaling_curve(predictions)),
        _section("Where a step's time goes, by the number of nodes", step_bars(predictions)),
    ]
    if heat:
        drawn = heat_map(heat, _rates(calibration))
        sections.append(_section("Efficiency by the number of nodes and the rate of a host's link", drawn))
    sections += [
        _section("Predictions", _table(_PREDICTED, [_cells(each) for each in predictions])),
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
    calibration: Calibration, predictions: Sequence[Prediction], simulate: Simulate, regions: int = 1
) -> list[HeatRow]:
    """Returns the efficiencies of the predicted jobs where links between hosts have other rates."""
    rows = []
    for each in predictions:
        if each.nodes == 1:
            continue
        row = []
        for times in RATES:
            links = with_rate(calibration.links, times)
            network = network_of(links, each.nodes, each.per_node, min(regions, each.nodes))
            row.append(predict(calibration, network, each.strategy, simulate, explains=False).efficiency)
        rows.append(HeatRow(each.nodes, tuple(row)))
    return rows


_PREDICTED = (
    "nodes", "ranks", "step", "p5", "p95", "samples/s", "efficiency", "memory of a rank", "bottleneck", "algorithm",
    "traffic of a node", "hidden", "node-hours",
)  # fmt: skip


def _cells(each: Prediction) -> tuple[str, ...]:
    return (
        f"{each.nodes:,}",
        f"{each.ranks:,}",
        spell_seconds(each.step.seconds),
        spell_seconds(each.low_s),
        spell_seconds(each.high_s),
        "-" if each.samples_per_s is None else f"{each.samples_per_s:,.0f}",
        f"{each.efficiency:.0%}",
        spell_bytes(each.memory.nbytes),
        each.bottleneck,
        each.step.algorithm,
        spell_bytes(each.traffic_nbytes),
        f"{each.step.overlap:.0%}",
        f"{each.node_hours:.3g}",
    )


def _advice(advice: Sequence[Advice]) -> str:
    if not advice:
        return "<p>None of the changes that were tried gains 1 % or saves memory.</p>"
    rows = [
        (
            each.change.what,
            f"{each.gain:+.0%}",
            spell_seconds(each.prediction.step.seconds),
            spell_bytes(each.prediction.memory.nbytes),
            each.change.but,
        )
        for each in advice
    ]
    return _table(("change", "rate", "step", "memory of a rank", "but"), rows)


def _facts(calibration: Calibration) -> list[tuple[str, str]]:
    origin, times, links = calibration.origin, calibration.times, calibration.links
    known = [("within a host", links.within_host), ("of a host", links.node), ("of a region", links.region)]
    return [
        ("measured on", f"{origin.host}, {origin.date}, {origin.cores} cores, {origin.threads} threads"),
        ("ranks that ran at the same time", str(origin.together)),
        ("step", f"{spell_seconds(calibration.alone_s)}, {len(calibration.step_s)} steps"),
        ("forward", spell_seconds(times.forward_s)),
        ("backward", spell_seconds(times.backward_s)),
        ("optimizer", spell_seconds(times.optimizer_s)),
        ("gradients", f"{len(calibration.gradients)}, {spell_bytes(calibration.gradient_nbytes)}"),
        *((f"link {name}", _link(link)) for name, link in known if link is not None),
    ]


def _link(link: Link) -> str:
    loss = f", {link.loss:.2%} lost" if link.loss else ""
    return f"{spell_seconds(link.latency_s)}, {8 * link.bytes_per_s / 1e9:.3g} Gbit/s{loss}"


def _rates(calibration: Calibration) -> list[str]:
    node = calibration.links.node
    known = 8 * node.bytes_per_s / 1e9 if node is not None else 1.0
    return [f"{known * times:.3g} Gbit/s" for times in RATES]


def _section(title: str, body: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{body}</section>\n'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
