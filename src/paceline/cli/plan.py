"""`paceline plan`: measures a script, predicts its training on other machines, and draws an algorithm's messages."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.durations import whole_number
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.comm.schedule.network import Network, NetworkLink
    from paceline.operate.plan.calibration import Calibration, Links
    from paceline.operate.plan.goodput import Goodput
    from paceline.operate.plan.prediction import Advice, JobPrediction
    from paceline.operate.plan.simulated_job import EventTimes
    from paceline.operate.plan.step_time import Strategy


_DEFAULT_NODE_LINK = "node=25gbit,0.05ms"  # for drawings
_WITHIN = "within=80gbit,0.002ms"
_GAMMA_S_PER_BYTE = 1e-10
_STAND_IN_BYTES_PER_S = 1e9  # assumed rate of state transfers if no link between hosts is known
_PASSED_ON = ("nnodes", "node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-id")
_USAGE_OF_MEASURING = "the script to measure follows the flags: paceline plan --measure -- train.py"
_USAGE_OF_PREDICTING = "pass one calibration file, which `paceline plan --measure -- train.py` writes: calibration.json"
_WORKER = "paceline.operate.plan.measure_worker"


def draw(options: argparse.Namespace) -> int:
    """Writes the drawing to `--output` or stdout; raises ValueError for invalid flags."""
    from paceline.comm.schedule.call_diagram import draw_call
    from paceline.comm.schedule.network import Network, parse_links
    from paceline.comm.schedule.steps import Operation

    per_node: int = options.per_node
    if options.ranks < 1 or per_node < 1 or options.ranks % per_node:
        raise ValueError(f"{options.ranks} ranks cannot be divided among nodes of {per_node} ranks each")
    links = parse_links(f"{_WITHIN},{options.links or _DEFAULT_NODE_LINK}")
    if "node" not in links:
        raise ValueError(
            f"--links {options.links} does not describe the links between nodes: add, for example, {_DEFAULT_NODE_LINK}"
        )
    network = Network.uniform(
        options.ranks // per_node,
        per_node,
        node=links["node"],
        within_host=links["within"],
        gamma_s_per_byte=_GAMMA_S_PER_BYTE,
    )
    drawing = draw_call(options.draw, Operation.named(options.operation), options.nbytes, network)
    if options.output is None:
        print(drawing, end="")
    else:
        Path(options.output).write_text(drawing)
        print(f"the drawing is in {options.output}")
    return 0


def _goodput_of_predictions(
    options: argparse.Namespace, calibration: Calibration, predictions: Sequence[JobPrediction]
) -> tuple[list[Goodput], EventTimes]:
    """Returns the goodput of each predicted job, and the event times of the last job."""
    from paceline.operate.plan.goodput import goodput, parse_failures, parse_times
    from paceline.operate.plan.simulated_job import EventTimes

    memory, node = calibration.memory, calibration.links.node
    state_nbytes = memory.parameter_nbytes + memory.optimizer_nbytes
    copying_s = state_nbytes / (_STAND_IN_BYTES_PER_S if node is None else node.bytes_per_s)
    failures, found = parse_failures(options.failures), []
    for prediction in predictions:
        times = parse_times(options.times, EventTimes(step_s=prediction.step.seconds, copying_s=copying_s))
        found.append(goodput(prediction.nodes, prediction.per_node, times, failures))
    return found, times


def _numbers(text: str) -> tuple[int, ...]:
    numbers = [whole_number(word, least=1) for word in text.split(",")]
    if None in numbers:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of at least 1, such as 2,4,8")
    return tuple(number for number in numbers if number is not None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `paceline plan`."""
    parser.add_argument("words", nargs="*", metavar="FILE", help="a calibration; with --measure, a script after `--`")
    parser.add_argument(
        "--links", metavar="LINKS", help="the links between hosts, such as node=25gbit,0.05ms,region=1gbit,20ms"
    )
    parser.add_argument("--per-node", type=int, default=1, metavar="N", help="ranks per node (default: 1)")
    predicting = parser.add_argument_group("predicting")
    predicting.add_argument("--nodes", type=_numbers, default=(1, 2, 4, 8), metavar="N,...", help="default: 1,2,4,8")
    predicting.add_argument(
        "--regions", type=int, default=1, metavar="N", help="number of regions into which the nodes are grouped"
    )
    predicting.add_argument("--bucket-cap-mb", type=float, metavar="MIB", help="bucket size (default: the script's)")
    predicting.add_argument("--wire", choices=("bf16", "int8", "int4"), help="data type between nodes")
    predicting.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="the stage of ZeRO (default: 0)")
    predicting.add_argument("--every", type=int, default=0, metavar="STEPS", help="DiLoCo: steps between exchanges")
    predicting.add_argument("--algorithm", metavar="NAME", help="algorithm for all collectives (default: the fastest)")
    predicting.add_argument("--json", action="store_true", help="print the predictions as JSON")
    predicting.add_argument("--html", type=Path, metavar="FILE", help="also write a report")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--measure", action="store_true", help="run a script for some steps; write a calibration")
    measuring.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: calibration.json")
    measuring.add_argument("--steps", type=int, default=30, metavar="N", help="steps to measure (default: 30)")
    measuring.add_argument(
        "--alone",
        action="store_true",
        help="run the script on one rank only, not on each of --per-node ranks at the same time",
    )
    failing = parser.add_argument_group("failures")
    failing.add_argument(
        "--failures", metavar="TIMES", help="mean times between failures, such as machine=30d,worker=90d,job=60d"
    )
    failing.add_argument("--times", metavar="TIMES", default="", help="such as repair=10min,saving=2s,restarting=5min")
    drawing = parser.add_argument_group("drawing")
    drawing.add_argument("--draw", metavar="ALGORITHM", help="draw an algorithm's messages over time, as an SVG")
    drawing.add_argument("--ranks", type=int, default=8, metavar="N", help="ranks in the drawing (default: 8)")
    drawing.add_argument("--operation", default="all_reduce", metavar="NAME", help="default: all_reduce")
    drawing.add_argument("--nbytes", type=int, default=1 << 20, metavar="N", help="size of the tensor (default: 1 MiB)")
    for name in _PASSED_ON:
        measuring.add_argument(f"--{name}", metavar="...", help="as for `paceline run`, to measure the links")


def run(options: argparse.Namespace) -> int:
    """Measures, predicts or draws, depending on the options; returns the exit code."""
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    try:
        if options.draw is not None:
            return draw(options)
        if not words or (not options.measure and len(words) != 1):
            raise ValueError(_USAGE_OF_MEASURING if options.measure else _USAGE_OF_PREDICTING)
        if options.measure and not (Path(words[0]).is_file() and os.access(words[0], os.R_OK)):
            raise ValueError(f"{words[0]} is not a readable file; {_USAGE_OF_MEASURING}")
        return _measure(options, words) if options.measure else _predict(options, Path(words[0]))
    except ValueError as error:
        raise PacelineError(str(error)) from error


def _measure(options: argparse.Namespace, words: Sequence[str]) -> int:
    from paceline.operate.launch import command
    from paceline.operate.launch.flags import Parser
    from paceline.operate.plan.calibration import encode, read

    output: Path = options.output or Path("calibration.json")
    with tempfile.TemporaryDirectory() as directory:
        measured = Path(directory, "calibration.json")
        settings = {
            "output": str(measured),
            "directory": directory,
            "steps": options.steps,
            "together": not options.alone,
        }
        flags = ["--nproc-per-node", str(options.per_node), "--local-ranks-filter", "0"]
        for name in _PASSED_ON:
            value = getattr(options, name.replace("-", "_"))
            flags += [] if value is None else [f"--{name}", value]
        parser = Parser(prog="paceline plan --measure")
        command.add_run_arguments(parser)
        code = command.run(parser.parse_args([*flags, "-m", _WORKER, json.dumps(settings), *words]))
        if code or not measured.exists():
            if not code:
                print("The links were measured; the calibration is on the machine of rank 0.")
            return code
        calibration = read(measured)
    if options.links is not None:
        calibration = replace(calibration, links=_with_links(calibration.links, options.links))
    output.write_bytes(encode(calibration))
    print(f"{output}: {_summary(calibration)}")
    if differences := _differences(calibration.links):
        print(f"The links between the hosts differ. To give these values to jobs from the start, set {differences}")
    return 0


def _differences(links: Links) -> str:
    """Returns the setting of the environment variable that describes unequal links, or "" if links are equal."""
    from paceline.comm.schedule.network import describe_differences

    if len(links.pairs) < 2:
        return ""
    hosts = 1 + max(pair.second for pair in links.pairs)
    described = describe_differences(hosts, {(pair.first, pair.second): pair.link for pair in links.pairs})
    return f"PACELINE_NETWORK='{described}'" if described else ""


def _summary(calibration: Calibration) -> str:
    from paceline.comm.schedule.algorithms import format_seconds
    from paceline.operate.plan.formatting import format_bytes

    node = calibration.links.node
    link = "no link between hosts" if node is None else f"{8 * node.bytes_per_s / 1e9:.3g} Gbit/s between hosts"
    return (
        f"{len(calibration.step_s)} steps of {format_seconds(calibration.alone_s)}, {len(calibration.gradients)} "
        f"gradients of {format_bytes(calibration.gradient_nbytes)} in total, {link}"
    )


def _predict(options: argparse.Namespace, path: Path) -> int:
    from paceline.comm.schedule.simulation import simulate_call
    from paceline.operate.plan.calibration import network_of, read
    from paceline.operate.plan.formatting import advice_text, facts_of, facts_of_advice, table_text
    from paceline.operate.plan.goodput import facts_of_goodput, goodput_text
    from paceline.operate.plan.prediction import advise, predict

    calibration = read(path)
    if options.links is not None:
        calibration = replace(calibration, links=_with_links(calibration.links, options.links))
    strategy = _strategy(options, calibration)

    def network(nodes: int, per_node: int) -> Network:
        return network_of(calibration.links, nodes, per_node, min(options.regions, nodes))

    predictions = [
        predict(calibration, network(nodes, options.per_node), strategy, simulate_call) for nodes in options.nodes
    ]
    advice = advise(calibration, predictions[-1], network, simulate_call)
    surviving, times = (
        (None, None) if options.failures is None else _goodput_of_predictions(options, calibration, predictions)
    )
    if options.json:
        facts = {"predictions": [*map(facts_of, predictions)], "advice": [*map(facts_of_advice, advice)]}
        if surviving is not None:
            facts["failures"] = [*map(facts_of_goodput, surviving)]
        print(json.dumps(facts, indent=1))
    else:
        print(f"{table_text(predictions)}\n{advice_text(predictions[-1].nodes, advice)}", end="")
        if surviving is not None and times is not None:
            print(f"\n{goodput_text(surviving, times)}", end="")
    if options.html is not None:
        _write_report(options, calibration, predictions, advice)
    return 0


def _write_report(
    options: argparse.Namespace,
    calibration: Calibration,
    predictions: Sequence[JobPrediction],
    advice: Sequence[Advice],
) -> None:
    from paceline import __version__
    from paceline.comm.schedule.simulation import simulate_call
    from paceline.operate.plan.report import heat_of, report

    heat = heat_of(calibration, predictions, simulate_call, options.regions)
    made = f"Created on {time.strftime('%d %B %Y, %H:%M', time.localtime())} by Paceline {__version__}."
    options.html.write_bytes(report(calibration, predictions, advice, heat, made))
    if not options.json:
        print(f"{options.html}: the same report with figures")


def _strategy(options: argparse.Namespace, calibration: Calibration) -> Strategy:
    from paceline.comm.schedule.algorithms import ALGORITHMS
    from paceline.operate.plan.step_time import measured
    from paceline.train.ddp.bucket_assignment import MIB, caps_of

    if options.algorithm is not None and options.algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {options.algorithm!r}; the algorithms are {', '.join(ALGORITHMS)}")
    strategy = measured(calibration)
    if options.bucket_cap_mb is not None:
        strategy = replace(strategy, bucket_nbytes=caps_of(int(options.bucket_cap_mb * MIB)))
    return replace(strategy, wire=options.wire, zero=options.zero, period=options.every, algorithm=options.algorithm)


def _with_links(links: Links, text: str) -> Links:
    """Returns the measured links after replacing those that `text` specifies."""
    from paceline.comm.schedule.network import parse_links

    given: Mapping[str, NetworkLink] = parse_links(text)
    if unknown := sorted(given.keys() - {"within", "node", "region"}):
        raise ValueError(f"--links has the unknown link {unknown[0]!r}; the links are within, node and region")
    return replace(
        links,
        within_host=given.get("within", links.within_host),
        node=given.get("node", links.node),
        region=given.get("region", links.region),
    )
