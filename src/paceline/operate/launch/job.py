"""`Job`: the job that a launcher runs, determined once from flags, PET_* variables and the scheduler's variables."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from string import Template
from typing import TypeVar

from paceline.comm.one_port.dialer import chosen_port
from paceline.comm.rendezvous.schedulers import Scheduler, detect
from paceline.durations import whole_number
from paceline.operate.launch.elastic_options import ElasticOptions, elastic_of
from paceline.operate.launch.option_types import OptionError, Streams, StreamsOfRanks, parse_seconds, parse_switch
from paceline.operate.launch.workers.cleanup import MARK

STDIN = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
"""Names of a script that is read from the launcher's stdin."""

_MOST_WORKERS = 1 << 15  # the default limit on process ids in Linux

_SHUTDOWN_TIMEOUT_S = 30.0  # torchrun's default
_TORCHRUNS_PORT = 29500
_SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # as in torchrun
_PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"  # as in torchrun
_TIMEOUTS = {"join_timeout", "timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "return_timeout"}
_SETTINGS = _TIMEOUTS | {"is_host"}
_IGNORED_SETTINGS = {"read_timeout", "keep_alive_interval", "keep_alive_max_attempt", "store_type", "rank"}
_Parsed = TypeVar("_Parsed")


class CommandKind(Enum):
    """The method for starting a command."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"
    PATH = "path"
    STDIN = "stdin"  # a script from the launcher's stdin


@dataclass(frozen=True)
class Command:
    """The script, module or program that the workers run."""

    argv: tuple[str, ...]  # script, module or program, followed by its arguments
    kind: CommandKind = CommandKind.SCRIPT
    passes_local_rank: bool = False  # whether to insert --local_rank=N before the arguments
    text_file: str | None = None  # the file with the text of a script that the launcher has read from its stdin


@dataclass(frozen=True)
class OutputOptions:
    """The destinations of the workers' output streams, by local rank."""

    log_dir: str | None = None
    redirects: StreamsOfRanks = field(default_factory=dict)
    tee: StreamsOfRanks = field(default_factory=dict)
    shown: frozenset[int] = frozenset()  # if empty, all ranks are shown
    stdout_words: tuple[str, ...] = ()
    stderr_words: tuple[str, ...] = ()
    line_prefix: str = ""  # replacement for "[rank N] "; may contain ${rank} and ${local_rank}

    @property
    def needs_files(self) -> bool:
        """Whether any output is written to files."""
        chosen = (*self.redirects.values(), *self.tee.values())
        return any(chosen) or bool(self.log_dir or self.stdout_words or self.stderr_words)


@dataclass(frozen=True)
class RendezvousOptions:
    """Parameters for the rendezvous between a job's machines. `address` is None on a single machine."""

    min_nodes: int = 1
    max_nodes: int = 1
    address: tuple[str, int] | None = None
    is_static: bool = False
    node_rank: int | None = None
    serves: bool | None = None  # None: this machine hosts the rendezvous if the address is its own
    local_address: str | None = None
    join_timeout_s: float = 600.0
    last_call_s: float = 0.5
    silence_s: float = 2.0
    return_timeout_s: float = 120.0  # time that an elastic job waits for unreachable machines
    running: tuple[str, str] | None = None  # identity of the elastic job to join, and its coordinator's address


@dataclass(frozen=True)
class DashboardOptions:
    """The address and the permissions of the dashboard."""

    port: int = 0  # port on loopback; 0 selects a free port
    socket: str | None = None  # path of a Unix socket to use instead of a port
    prefix: str = ""  # path under which a proxy serves the dashboard
    hosts: tuple[str, ...] = ()  # host names under which a proxy serves the dashboard
    acts: bool = False  # whether the dashboard may act on the job, e.g. capture stacks


@dataclass(frozen=True)
class Job:
    """A job, from the perspective of the launcher on one machine."""

    command: Command
    workers: int = 1
    run_id: str = ""
    rendezvous: RendezvousOptions = field(default_factory=RendezvousOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    port: int | None = None  # MASTER_PORT on a single machine
    max_restarts: int = 0
    shutdown_timeout_s: float = _SHUTDOWN_TIMEOUT_S
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    role: str = "default"
    virtual_local_rank: bool = False
    binding: str | None = "exclusive"  # mode for binding workers to cores; None disables binding
    is_binding_requested: bool = False
    stdin_rank: int | None = 0  # rank that reads the launcher's stdin, if it runs on this machine
    events: bool = False
    stall_after_s: float = 15.0  # time after which a call counts as stalled and is diagnosed; 0 disables this
    start_method: str = "auto"  # "spawn": new interpreters; "fork": forks of a template process
    slot: tuple[int, int] = (0, 1)  # (i, n): the i-th of n launchers that a scheduler started on this machine
    scheduler: Scheduler | None = None
    elastic: ElasticOptions | None = None
    page: DashboardOptions | None = None
    compat: tuple[str, ...] = ()  # libraries whose calls are handled by Paceline
    one_port: int | None = None  # port for all connections to a machine; None for a port per listener


def job_of(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Job:
    """Returns the job described by the parsed flags; raises OptionError if they are contradictory or incomplete."""
    # In a nested job, a worker started this launcher, and the scheduler's variables describe the outer job.
    is_alone = options.standalone or MARK in environment
    scheduler = None if is_alone else detect(environment)
    command = Command((options.script, *options.args), _kind(options), getattr(options, "passes_local_rank", False))
    if options.port is None and not is_alone:
        options.port = chosen_port(environment)
    rendezvous = _rendezvous(options, scheduler)
    workers = 1 if scheduler is not None and scheduler.is_one_a_rank else options.nproc_per_node
    if workers == 0:
        raise OptionError(
            "this process has no usable GPU on this machine; set --nproc-per-node to cpu, auto or a number"
        )
    if workers > _MOST_WORKERS:
        raise OptionError(f"--nproc-per-node {workers} is too large: a machine can run at most {_MOST_WORKERS} workers")
    if rendezvous.address is None and options.stdin is not None and options.stdin >= workers:
        raise OptionError(f"--stdin {options.stdin} is too large: the ranks are 0 to {workers - 1}")
    if rendezvous.address is not None and options.port is not None and scheduler is not None and scheduler.slot[1] > 1:
        raise OptionError(
            f"--port {options.port}: {scheduler.slot[1]} launchers on each machine cannot share it; let the scheduler "
            "start one launcher per machine, with --nproc-per-node workers"
        )
    return Job(
        command=command,
        workers=workers,
        run_id=options.rdzv_id if options.rdzv_id not in ("", "none") else secrets.token_hex(4),
        rendezvous=rendezvous,
        output=_output(options, environment),
        port=options.master_port if rendezvous.address is None else None,
        max_restarts=options.max_restarts or 0,
        shutdown_timeout_s=shutdown_timeout_s(options, environment),
        signals=options.signals_to_handle,
        role=options.role,
        virtual_local_rank=options.virtual_local_rank,
        binding=None if options.no_pin else options.numa_binding or "exclusive",
        is_binding_requested=options.numa_binding is not None,
        stdin_rank=options.stdin,
        events=options.event_log_handler == "console",
        stall_after_s=options.stall_after,
        start_method="fork" if options.start_method == "forkserver" else options.start_method,
        slot=scheduler.slot if scheduler is not None else (0, 1),
        scheduler=scheduler,
        elastic=elastic_of(options, workers, rendezvous.address is not None),
        page=dashboard_options_of(options),
        compat=options.compat,
        one_port=options.port if rendezvous.address is not None else None,
    )


def shutdown_timeout_s(options: argparse.Namespace, environment: Mapping[str, str]) -> float:
    """Returns the time between the shutdown request and SIGKILL, in seconds."""
    if options.shutdown_timeout is not None:
        return float(options.shutdown_timeout)
    given = environment.get(_SHUTDOWN_VARIABLE)
    return _parsed(parse_seconds, given, _SHUTDOWN_VARIABLE) if given else _SHUTDOWN_TIMEOUT_S


def _parsed(parse: Callable[[str], _Parsed], text: str, name: str) -> _Parsed:
    try:
        return parse(text)
    except argparse.ArgumentTypeError as error:
        raise OptionError(f"{name}: {error}") from None


def _kind(options: argparse.Namespace) -> CommandKind:
    if options.module and options.no_python:
        raise OptionError("--module and --no-python are mutually exclusive: modules are run by Python")
    if options.run_path:
        return CommandKind.PATH
    kind = CommandKind.MODULE if options.module else CommandKind.PROGRAM if options.no_python else CommandKind.SCRIPT
    if kind in (CommandKind.SCRIPT, CommandKind.MODULE) and not os.path.isabs(options.script):
        try:
            os.getcwd()
        except FileNotFoundError:
            raise OptionError(
                "the current directory has been removed, so relative paths cannot be resolved; change to another "
                "directory"
            ) from None
    if kind is CommandKind.SCRIPT and options.script in STDIN:
        return CommandKind.STDIN
    path = Path(options.script)
    if kind is CommandKind.SCRIPT and path.is_dir():
        if not any((path / name).is_file() for name in ("__main__.py", "__main__.pyc")):
            raise OptionError(f"{options.script} is a directory without __main__.py; pass the path of a script")
    elif kind is CommandKind.SCRIPT and not path.is_file():
        if path.is_fifo() or path.is_char_device():
            raise OptionError(
                f"{options.script} is not a regular file, from which only one worker could read the script; write the "
                "script to a file and pass its path, or pass - and the script as stdin"
            )
        what = "is not a file" if path.exists() else "does not exist"
        raise OptionError(f"{options.script} {what}; pass the path of a script, or -m and the name of a module")
    return kind


def _rendezvous(options: argparse.Namespace, scheduler: Scheduler | None) -> RendezvousOptions:
    least, most = options.nnodes
    if options.standalone:
        return RendezvousOptions()
    if scheduler is not None and scheduler.nodes is not None and (least, most) == (1, 1):
        least = most = scheduler.nodes
    conf = options.rdzv_conf
    if unknown := sorted(set(conf) - _SETTINGS - _IGNORED_SETTINGS):
        raise OptionError(f"--rdzv-conf has unknown settings: {', '.join(unknown)}; known: {sorted(_SETTINGS)}")
    if most == 1:
        return RendezvousOptions()  # a single machine does not need a rendezvous, even if an address is given
    is_dynamic = options.print_token or (options.rdzv_endpoint and options.node_rank is None)
    is_static = options.rdzv_backend == "static" and not is_dynamic and not options.elastic
    address, serves = _address(options, scheduler)
    node_rank = options.node_rank if options.node_rank is not None else scheduler.node_rank if scheduler else None
    if is_static:
        if least != most:
            raise OptionError(
                f"--nnodes {least}:{most} needs machines that can join in any order: --rdzv-backend c10d and "
                "--rdzv-endpoint HOST:PORT instead of --master-addr"
            )
        if node_rank is None:
            raise OptionError(f"--nnodes {most} needs --node-rank, this machine's number from 0 to {most - 1}")
        if node_rank >= most:
            raise OptionError(
                f"--node-rank {node_rank} is too large: with --nnodes {most} the numbers are 0 to {most - 1}"
            )
        serves = node_rank == 0
    elif options.elastic and serves is None and not options.rdzv_endpoint and node_rank is not None:
        serves = node_rank == 0
    if "is_host" in conf:
        serves = _parsed(parse_switch, conf["is_host"], "--rdzv-conf is_host")

    def time_s(name: str, otherwise: float) -> float:
        return _parsed(parse_seconds, conf[name], f"--rdzv-conf {name}") if name in conf else otherwise

    return RendezvousOptions(
        min_nodes=least,
        max_nodes=most,
        address=address,
        is_static=is_static,
        node_rank=node_rank if is_static else None,
        serves=serves,
        local_address=options.local_addr,
        join_timeout_s=time_s("join_timeout", time_s("timeout", 600.0)),
        last_call_s=time_s("last_call_timeout", 0.5),
        silence_s=time_s("heartbeat_timeout", 2.0),
        return_timeout_s=time_s("return_timeout", 120.0),
    )


def _address(options: argparse.Namespace, scheduler: Scheduler | None) -> tuple[tuple[str, int], bool | None]:
    """Returns the address of the rendezvous, and whether this machine hosts the rendezvous (None if unknown)."""
    otherwise = options.port or _TORCHRUNS_PORT
    if options.rdzv_endpoint:
        return endpoint_of(options.rdzv_endpoint, otherwise), None
    host = options.master_addr or (scheduler.address if scheduler else None)
    port = options.master_port or (scheduler.port if scheduler else None) or otherwise
    if options.print_token:
        return (host or "", options.master_port or options.port or 0), True
    if host is None:
        raise OptionError(
            "several machines need a rendezvous address: --master-addr ADDRESS of machine 0 (with --node-rank), or "
            "--rdzv-backend c10d --rdzv-endpoint HOST:PORT, or a token from `paceline run --print-token`"
        )
    return (host.strip("[]"), port), None


def endpoint_of(text: str, otherwise: int = _TORCHRUNS_PORT) -> tuple[str, int]:
    """Parses `host:port`, `[v6]:port` or `host`; `otherwise` is the default port."""
    if "," in text:
        raise OptionError(
            f"--rdzv-endpoint {text!r} contains several addresses. The rendezvous has one host, and the job ends if "
            "that host is lost: specify the most reliable machine"
        )
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = text.rpartition(":") if text.count(":") == 1 else (text, "", "")
    number = whole_number(port, most=65535) if port else otherwise
    if not host or number is None:
        raise OptionError(
            f"--rdzv-endpoint {text!r} is not HOST:PORT; enclose an IPv6 address in brackets: [fd00::1]:29400"
        )
    return host, number


def _output(options: argparse.Namespace, environment: Mapping[str, str]) -> OutputOptions:
    tee = options.tee
    if options.log_dir and not any((*options.redirects.values(), *tee.values())):
        tee = {None: Streams.BOTH}  # --log-dir without other output options saves both streams
    template = options.log_line_prefix_template or environment.get(_PREFIX_VARIABLE, "")
    return OutputOptions(
        options.log_dir,
        options.redirects,
        tee,
        options.local_ranks_filter,
        options.duplicate_stdout_filters,
        options.duplicate_stderr_filters,
        Template(template).safe_substitute(role_name=options.role, hostname=socket.gethostname()),
    )


def dashboard_options_of(options: argparse.Namespace) -> DashboardOptions | None:
    """Returns the dashboard's options, or None without --dash."""
    others = {
        "--dash-port": options.dash_port,
        "--dash-socket": options.dash_socket,
        "--dash-prefix": options.dash_prefix,
        "--dash-host": options.dash_host,
        "--dash-actions": options.dash_actions,
    }
    given = [name for name, value in others.items() if value]
    if not options.dash:
        if given:
            raise OptionError(f"{given[0]} configures the live page, which requires --dash")
        return None
    if options.dash_port and options.dash_socket:
        raise OptionError("--dash-port and --dash-socket are mutually exclusive")
    prefix = options.dash_prefix.rstrip("/")
    if prefix and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", prefix):
        raise OptionError(f"--dash-prefix {options.dash_prefix!r} is not a path such as /user/ana/proxy/8080")
    hosts = tuple(host.strip().lower() for host in options.dash_host.split(",") if host.strip())
    if wrong := [host for host in hosts if not re.fullmatch(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]", host)]:
        raise OptionError(f"--dash-host {wrong[0]!r} is not the name of a host; pass names without ports")
    return DashboardOptions(options.dash_port or 0, options.dash_socket, prefix, hosts, options.dash_actions)
