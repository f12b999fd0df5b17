"""Describes for `--dry-run` what would start where with which variables; a rank's lines can be pasted into a shell."""

from __future__ import annotations

import os
import shlex
import socket
import sys

from paceline.launch.compat import compat_variables
from paceline.launch.elastic.options import ElasticOptions
from paceline.launch.job import Job, Kind
from paceline.launch.machine import Machine
from paceline.launch.nodes.messages import Start
from paceline.launch.placement import format_cpulist
from paceline.launch.start_workers import place_of, variables_of
from paceline.security.levels import chosen_level

_UNKNOWN = "<chosen at the start>"


def describe_plan(job: Job, machine: Machine) -> str:
    """Returns the plan as text."""
    rendezvous = job.rendezvous
    lines = [*machine.remarks(job)]
    if rendezvous.address is None:
        lines.append(f"one machine: {socket.gethostname()}; run id {job.run_id}; the ranks meet at a Unix socket")
    else:
        count = f"{rendezvous.min_nodes}" + (
            f" to {rendezvous.max_nodes}" if rendezvous.max_nodes != rendezvous.min_nodes else ""
        )
        number = f"; this is machine {rendezvous.node_rank}" if rendezvous.node_rank is not None else ""
        lines.append(f"{count} machines, which meet at {rendezvous.address[0]}:{rendezvous.address[1]}{number}")
        has_secret = any(name in os.environ for name in ("PACELINE_SECRET", "PACELINE_SECRET_FILE"))
        is_made = job.scheduler is not None and job.scheduler.is_slurm
        otherwise = "made by launcher 0, in a file" if is_made else "none yet; set PACELINE_SECRET on all"
        lines.append(f"connections between machines: {chosen_level() or 'encrypt where an address is public'}")
        if job.one_port is not None:
            lines.append(f"each machine is reached at port {job.one_port} only")
        lines.append(f"secret: {'from the environment' if has_secret else otherwise}")
    replaced = f"{job.max_restarts} restarts" if job.elastic is None else _replacement(job.elastic)
    lines.append(
        f"on failure: {replaced}; to end: {', '.join(each.name for each in job.signals)}, then "
        f"{job.shutdown_timeout_s:g} s until SIGKILL"
    )
    start = _start(job)
    if start is None:
        lines.append(f"{job.workers} workers here; their ranks are decided when the machines have met")
        start = Start(1, 0, job.max_restarts, job.run_id, 0, 1, 0, job.workers, 0, job.workers, _UNKNOWN, 0)
    for index in range(job.workers):
        lines += ["", *_worker(job, machine, start, index)]
    return "\n".join(lines)


def _replacement(elastic: ElasticOptions) -> str:
    most = "" if elastic.most_replacements is None else f", at most {elastic.most_replacements} times on each machine"
    chaos = f"; chaos: {elastic.chaos}" if elastic.chaos is not None else ""
    return f"a worker is replaced while at least {elastic.min_workers} train on{most}{chaos}"


def _start(job: Job) -> Start | None:
    """Returns the order that the meeting would give, if it is known beforehand."""
    rendezvous = job.rendezvous
    if rendezvous.address is None:
        nodes, here, address = 1, 0, "127.0.0.1"
    elif rendezvous.node_rank is not None:
        nodes, here, address = rendezvous.max_nodes, rendezvous.node_rank, rendezvous.address[0]
    else:
        return None
    first, world = here * job.workers, nodes * job.workers  # if all machines have as many
    return Start(1, 0, job.max_restarts, job.run_id, here, nodes, first, world, first, world, address, job.port or 0)


def _worker(job: Job, machine: Machine, start: Start, index: int) -> list[str]:
    place = place_of(job, start, index)
    variables = variables_of(job, start, index, os.environ, machine.gpus)
    variables |= compat_variables(job.compat, os.environ)
    if start.master_port == 0:
        variables["MASTER_PORT"] = _UNKNOWN
    if machine.threads is not None:
        variables["OMP_NUM_THREADS"] = str(machine.threads)
    where = f"on cores {format_cpulist(machine.cores[place.local_rank])}" if machine.cores else "on any core"
    python = [] if job.command.kind is Kind.PROGRAM else [os.environ.get("PYTHON_EXEC", sys.executable)]
    module = ["-m"] if job.command.kind is Kind.MODULE else []
    program, *arguments = job.command.argv
    legacy = [f"--local_rank={place.local_rank}"] if job.command.passes_local_rank else []
    return [
        f"{'rank' if job.elastic is None else 'slot'} {place.rank}, {where}:",
        *(f"  {name}={shlex.quote(value)} \\" for name, value in variables.items()),
        f"  {shlex.join([*python, *module, program, *legacy, *arguments])}",
    ]
