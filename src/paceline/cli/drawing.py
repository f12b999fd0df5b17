"""`paceline plan --draw`: draws an algorithm's messages."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_UNKNOWN = "node=25gbit,0.05ms"
_WITHIN = "within=80gbit,0.002ms"
_GAMMA_S_PER_BYTE = 1e-10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a drawing. `--links`, `--per-node` and `--output` are the command's own."""
    drawing = parser.add_argument_group("drawing")
    drawing.add_argument("--draw", metavar="ALGORITHM", help="draw who sends what to whom when, as an SVG")
    drawing.add_argument("--ranks", type=int, default=8, metavar="N", help="in the drawing (default: 8)")
    drawing.add_argument("--operation", default="all_reduce", metavar="NAME", help="default: all_reduce")
    drawing.add_argument("--nbytes", type=int, default=1 << 20, metavar="N", help="of the tensor (default: 1 MiB)")


def run(options: argparse.Namespace) -> int:
    """Draws what the flags say into `--output`, or to the standard output; returns the exit code."""
    from paceline.schedule.drawing import draw_call
    from paceline.schedule.network import Network, parse_links
    from paceline.schedule.steps import Operation

    per_node: int = options.per_node
    try:
        if options.ranks < 1 or per_node < 1 or options.ranks % per_node:
            raise ValueError(f"{options.ranks} ranks cannot be divided among nodes of {per_node} ranks each")
        links = parse_links(f"{_WITHIN},{options.links or _UNKNOWN}")
        if "node" not in links:
            raise ValueError(f"--links {options.links} says nothing of the nodes' links: add, for example, {_UNKNOWN}")
        network = Network.uniform(
            options.ranks // per_node,
            per_node,
            node=links["node"],
            within_host=links["within"],
            gamma_s_per_byte=_GAMMA_S_PER_BYTE,
        )
        drawing = draw_call(options.draw, Operation.named(options.operation), options.nbytes, network)
    except ValueError as error:
        print(f"paceline plan: {error}", file=sys.stderr)
        return 2
    if options.output is None:
        print(drawing, end="")
    else:
        Path(options.output).write_text(drawing)
        print(f"the drawing is in {options.output}")
    return 0
