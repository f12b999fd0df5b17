"""Draws the layers of Paceline with their components, and the path of three calls through them.

python docs/pictures/architecture.py        writes architecture.svg next to this script

The picture shows exactly the tables below. A test checks that each file exists and defines the listed function. If you
rename or move one of them, update its line here and run this script.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape


@dataclass(frozen=True)
class Component:
    """A row of the picture: its layer, its name, its purpose, and its folders."""

    layer: str
    name: str
    does: str
    folders: tuple[str, ...]


@dataclass(frozen=True)
class Hop:
    """A function on the path of a call. Methods are qualified with their class."""

    file: str
    function: str


@dataclass(frozen=True)
class Route:
    """The path of a call from top to bottom, with a note on what happens after the last hop."""

    title: str
    color: str
    hops: tuple[Hop, ...]
    after: str


COMPONENTS = (
    Component("cli", "cli", "the commands", ("src/paceline/cli",)),
    Component(
        "interop",
        "torch_backend, horovod,\nintegrations, migrate",
        "Paceline in other libraries",
        tuple(f"src/paceline/interop/{room}" for room in ("torch_backend", "horovod", "integrations", "migrate")),
    ),
    Component("operate", "plan", "predicts jobs on\nother machines", ("src/paceline/operate/plan",)),
    Component("operate", "launch", "starts, monitors and\nstops workers; no torch", ("src/paceline/operate/launch",)),
    Component(
        "operate",
        "dashboard, diagnosis",
        "shows and explains the\nprocesses' recordings",
        ("src/paceline/operate/dashboard", "src/paceline/operate/diagnosis"),
    ),
    Component("train", "checkpoint", "training state on disk,\nnever torn", ("src/paceline/train/checkpoint",)),
    Component("train", "elastic", "views, rounds, and state\nfor joining workers", ("src/paceline/train/elastic",)),
    Component(
        "train",
        "ddp, zero, diloco,\nshared_model, tensor,\npipeline, logical_shards",
        "replicas and divided\nmodels",
        tuple(
            f"src/paceline/train/{room}"
            for room in ("ddp", "zero", "diloco", "shared_model", "tensor", "pipeline", "logical_shards")
        ),
    ),
    Component(
        "train",
        "data, checks",
        "data loading; checks of\ngradients and replicas",
        ("src/paceline/train/data", "src/paceline/train/checks"),
    ),
    Component("comm", "group", "collectives, as called\nby users", ("src/paceline/comm/group",)),
    Component("comm", "engine", "connections, and the\nexecution of calls", ("src/paceline/comm/engine",)),
    Component("comm", "schedule", "collectives as lists of\nsteps, for several hosts", ("src/paceline/comm/schedule",)),
    Component("comm", "rendezvous", "agreement on ranks", ("src/paceline/comm/rendezvous",)),
    Component("comm", "store", "key-value stores", ("src/paceline/comm/store",)),
    Component("comm", "one_port", "all listeners of a machine\non one port", ("src/paceline/comm/one_port",)),
    Component("comm", "security", "the secret and\nthe handshake", ("src/paceline/comm/security",)),
    Component("comm", "record", "calls and steps, in memory\nthat outlives the process", ("src/paceline/comm/record",)),
    Component("core", "native", "C++: shared memory,\nTCP, reductions", ("native",)),
)

CORE_ALL_REDUCE = (
    Hop("native/call/call_queue.cpp", "CallQueue::run"),
    Hop("native/host/group.cpp", "Group::run"),
    Hop("native/host/reductions.cpp", "Group::all_reduce"),
    Hop("native/host/group.cpp", "Group::publish"),
    Hop("native/host/group.cpp", "Group::await"),
    Hop("native/reduce/reduce.cpp", "find_reduction"),
)

ROUTES = (
    Route(
        "paceline run train.py",
        "#b45309",
        (
            Hop("src/paceline/cli/main.py", "main"),
            Hop("src/paceline/operate/launch/command.py", "run"),
            Hop("src/paceline/operate/launch/job.py", "job_of"),
            Hop("src/paceline/operate/launch/worker_group_launcher.py", "run"),
            Hop("src/paceline/operate/launch/worker_group_launcher.py", "open_rendezvous"),
            Hop("src/paceline/operate/launch/launcher.py", "Launcher.run"),
            Hop("src/paceline/operate/launch/multinode/membership.py", "Membership.joined"),
            Hop("src/paceline/operate/launch/worker_group_launcher.py", "WorkerGroupLauncher._start"),
            Hop("src/paceline/operate/launch/workers/start_workers.py", "start_workers"),
            Hop("src/paceline/operate/launch/workers/forker.py", "Forker.start"),
            Hop("src/paceline/operate/launch/workers/bootstrap.py", "run"),
            Hop("src/paceline/comm/group/init.py", "init_process_group"),
            Hop("src/paceline/comm/rendezvous/rendezvous.py", "rendezvous"),
            Hop("src/paceline/comm/rendezvous/check_in.py", "claim_rank"),
            Hop("src/paceline/comm/store/remote_store.py", "RemoteStore"),
        ),
        "From bootstrap.py, this runs in the worker.\nThen engine/native connects the ranks.",
    ),
    Route(
        "loss.backward() under DDP",
        "#1d4ed8",
        (
            Hop("src/paceline/train/ddp/distributed_data_parallel.py", "DistributedDataParallel.forward"),
            Hop("src/paceline/train/ddp/reducer.py", "Reducer.expect"),
            Hop("src/paceline/train/ddp/reducer.py", "OutputHooks.watch"),
            Hop("src/paceline/train/ddp/reducer.py", "Reducer._begin"),
            Hop("src/paceline/train/ddp/reducer.py", "Reducer._end"),
            Hop("src/paceline/train/ddp/gradient_averager.py", "GradientAverager.average_rest"),
            Hop("src/paceline/train/ddp/gradient_buckets.py", "BucketGradients.collect"),
            Hop("src/paceline/comm/group/process_group.py", "ProcessGroup.all_reduce_memory"),
            Hop("src/paceline/comm/group/process_group.py", "ProcessGroup.run_on_cpu"),
            Hop("native/bindings/engine.cpp", "HostGroup::run"),
        ),
        "Continues like all_reduce; finally,\nthe averages replace the gradients.",
    ),
    Route(
        "all_reduce(tensor), one host",
        "#15803d",
        (
            Hop("src/paceline/comm/group/collectives/collectives.py", "all_reduce"),
            Hop("src/paceline/comm/group/default.py", "resolve"),
            Hop("src/paceline/comm/group/process_group.py", "ProcessGroup.all_reduce"),
            Hop("native/bindings/engine.cpp", "HostGroup::all_reduce"),
            *CORE_ALL_REDUCE,
        ),
        "The sum is in the tensor.",
    ),
)

LEFT, COLUMN, TOP, STOP, PAD = 268, 318, 92, 42, 16
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
STYLE = """
.paper { fill: #ffffff } .band { fill: #f1f3f7 } .ink { fill: #1f2430 } .quiet { fill: #5b6472 }
.layer { fill: #475569 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #161b22 } .band { fill: #1e242d } .ink { fill: #e6e9ef } .quiet { fill: #9aa4b2 }
  .layer { fill: #8b98ab }
}
"""


def component_of(hop: Hop) -> int:
    """Returns the index of the component that contains a hop's file."""
    return next(
        at
        for at, component in enumerate(COMPONENTS)
        if any(hop.file.startswith(f"{folder}/") for folder in component.folders)
    )


def short(file: str) -> str:
    """Returns the path of a file without the prefix that all Python files share."""
    return file.removeprefix("src/paceline/")


def text(x: float, y: float, words: str, size: float, look: str = "ink", more: str = "") -> str:
    """Returns a line of text."""
    return f'<text x="{x}" y="{y}" font-size="{size}" class="{look}"{more}>{escape(words)}</text>'


def rows() -> list[tuple[int, int]]:
    """Returns the top and the height of each component, which fits the most hops that a route has in the component."""
    found, top = [], TOP
    for at in range(len(COMPONENTS)):
        most = max(sum(component_of(hop) == at for hop in route.hops) for route in ROUTES)
        height = max(most * STOP + PAD, 68) + (20 if at == len(COMPONENTS) - 1 else 0)
        found.append((top, height))
        top += height
    return found


def draw_components(width: int) -> list[str]:
    """Returns bands with the names and purposes of the components."""
    shapes = []
    for at, (component, (top, height)) in enumerate(zip(COMPONENTS, rows(), strict=True)):
        if at % 2 == 0:
            shapes.append(f'<rect x="44" y="{top}" width="{width - 56}" height="{height}" rx="8" class="band"/>')
        names, does = component.name.split("\n"), component.does.split("\n")
        y = top + 24
        for line in names:
            shapes.append(text(58, y, line, 14, more=' font-weight="600"'))
            y += 17
        for line in does:
            shapes.append(text(58, y, line, 12, "quiet"))
            y += 15
    return shapes


def draw_layers() -> list[str]:
    """Returns a strip with the name of each layer, to the left of its components."""
    shapes = []
    for layer in dict.fromkeys(component.layer for component in COMPONENTS):
        spans = [span for component, span in zip(COMPONENTS, rows(), strict=True) if component.layer == layer]
        top, bottom = spans[0][0] + 2, sum(spans[-1]) - 2
        turned = f' font-weight="600" text-anchor="middle" transform="rotate(-90 29 {(top + bottom) / 2})"'
        shapes.append(f'<rect x="12" y="{top}" width="26" height="{bottom - top}" rx="8" class="layer"/>')
        shapes.append(text(29, (top + bottom) / 2 + 3, layer, 13.5, "paper", turned))
    return shapes


def draw_route(at: int, route: Route) -> list[str]:
    """Returns a vertical line with a numbered circle for each hop."""
    x = LEFT + at * COLUMN + 12
    stops: list[float] = []
    taken = [0] * len(COMPONENTS)
    for hop in route.hops:
        row = component_of(hop)
        stops.append(rows()[row][0] + PAD / 2 + STOP / 2 + taken[row] * STOP)
        taken[row] += 1
    shapes = [
        text(x - 10, 62, route.title, 14.5, more=f' font-weight="600" font-family="{MONO}"'),
        f'<line x1="{x}" y1="{stops[0]}" x2="{x}" y2="{stops[-1]}" stroke="{route.color}" stroke-width="3"/>',
    ]
    for number, (hop, y) in enumerate(zip(route.hops, stops, strict=True), start=1):
        shapes.append(f'<circle cx="{x}" cy="{y}" r="10.5" fill="{route.color}"/>')
        shapes.append(f'<text x="{x}" y="{y + 4}" font-size="11" fill="#ffffff" text-anchor="middle">{number}</text>')
        shapes.append(text(x + 20, y - 2, hop.function, 12.5, more=f' font-weight="600" font-family="{MONO}"'))
        shapes.append(text(x + 20, y + 13, short(hop.file), 11.5, "quiet", f' font-family="{MONO}"'))
    for line, words in enumerate(route.after.split("\n")):
        shapes.append(text(x + 20, stops[-1] + 36 + 16 * line, words, 12, "quiet", ' font-style="italic"'))
    return shapes


def svg() -> str:
    """Returns the picture as SVG."""
    top, height = rows()[-1]
    wide, high = LEFT + len(ROUTES) * COLUMN + 8, top + height + 14
    title = "The four layers of Paceline above the core, and the path of three calls through them"
    shapes = [shape for at, route in enumerate(ROUTES) for shape in draw_route(at, route)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
            'font-family="Helvetica, Arial, sans-serif" role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{wide}" height="{high}" rx="10" class="paper"/>',
            text(28, 32, title, 16),
            *draw_layers(),
            *draw_components(wide),
            *shapes,
            "</svg>\n",
        ]
    )


PICTURES = {"architecture.svg": svg}


def main() -> None:
    """Writes the SVG file."""
    Path(__file__).with_name("architecture.svg").write_text(svg())


if __name__ == "__main__":
    main()
