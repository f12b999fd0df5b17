"""The flags of `paceline run` as a table: torchrun's, both spellings, with their PET_* variables, and a few more."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.launch import values
from paceline.launch.compat import libraries
from paceline.launch.completion import SHELLS, CompletionAction
from paceline.launch.elastic.chaos import Chaos
from paceline.security.levels import LEVELS

_WORD = re.compile(r"[A-Za-z][\w-]*")


@dataclass(frozen=True)
class Flag:
    """One flag; a switch has no `parse`. `variable` says whether PET_<NAME> gives its default, as for torchrun."""

    name: str
    help: str
    parse: Callable[[str], object] | None = None
    default: str | None = None
    metavar: str = "N"
    short: str | None = None
    choices: Sequence[str] | None = None
    variable: bool = True
    ours: bool = False
    action: type[argparse.Action] | None = None

    @property
    def dest(self) -> str:
        """The attribute of the parsed options."""
        return self.name.replace("-", "_")

    @property
    def spellings(self) -> list[str]:
        """As it may be written: short, with dashes, with underscores."""
        long = list(dict.fromkeys((f"--{self.name}", f"--{self.dest}")))
        return [self.short, *long] if self.short else long


FLAGS = (
    # where
    Flag("nnodes", "machines: a number, or a range between which they may come and go", values.nodes, "1", "N|MIN:MAX"),
    Flag("nproc-per-node", "workers of this machine; gpu: one for each GPU, cpu: one for each core, auto: gpu if any",
         values.workers, "1", "N|auto|gpu|cpu"),
    Flag("node-rank", "this machine's number, if machines have fixed numbers (--rdzv-backend static)", values.from_0),
    Flag("master-addr", "the address of machine 0, where the machines meet", str, metavar="ADDRESS"),
    Flag("master-port", "its port; on one machine, MASTER_PORT of the workers (a free one if not given)", values.port,
         metavar="PORT"),
    Flag("local-addr", "this machine's address for the others (default: the one that leads to the meeting place)", str,
         metavar="ADDRESS"),
    Flag("rdzv-backend", "static: numbered machines; c10d: machines in any order", values.backend, "static",
         "NAME"),
    Flag("rdzv-endpoint", "where they meet; the machine whose address it is serves", str, "", "HOST:PORT"),
    Flag("rdzv-id", "the job's name, the same on all machines", str, "none", "NAME"),
    Flag("rdzv-conf", "join_timeout, last_call_timeout, heartbeat_timeout, return_timeout (seconds), is_host (0 or 1)",
         values.settings, "", "KEY=VALUE,..."),
    Flag("standalone", "use one machine, whatever the other flags and the environment say"),
    # restarts
    Flag("max-restarts", "how often failed workers are restarted (default: 0; with --elastic, how many workers each "
         "machine replaces, without a bound if not given)", values.from_0),
    Flag("monitor-interval", "accepted and ignored: the launcher notices at once when a worker ends", values.seconds,
         "0.1", "SECONDS"),
    Flag("shutdown-timeout", "time from the request to end to SIGKILL (default: 30, or TORCH_ELASTIC_SHUTDOWN_TIMEOUT)",
         values.seconds, metavar="SECONDS"),
    Flag("signals-to-handle", "signals that end the job; the launcher passes them on to the workers", values.signals,
         "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "NAMES"),
    # what
    Flag("module", "SCRIPT is a module, as for python -m", short="-m"),
    Flag("no-python", "SCRIPT is a program, not a Python script"),
    Flag("run-path", "SCRIPT is run by runpy.run_path"),
    Flag("start-method", "spawn: a new interpreter each; fork, forkserver: forks of one that holds no torch; auto: "
         "forks if there are many workers for each core", str, "auto", "METHOD",
         choices=("auto", "spawn", "fork", "forkserver")),
    Flag("role", "ROLE_NAME of the workers", str, "default", "NAME"),
    Flag("virtual-local-rank", "each worker sees only its own GPU, as number 0, and LOCAL_RANK=0"),
    # output
    Flag("log-dir", "keep the workers' output in DIR/RUN_ID/attempt_N/RANK/", str, metavar="DIR"),
    Flag("redirects", "streams that go to files only; 0 none, 1 stdout, 2 stderr, 3 both, or by local rank: 0:1,1:2",
         values.streams, "0", "STREAMS", short="-r"),
    Flag("tee", "streams that go to files and to the console, in the form of --redirects", values.streams, "0",
         "STREAMS", short="-t"),
    Flag("local-ranks-filter", "the local ranks that are shown on the console", values.ranks, "", "0,1,..."),
    Flag("log-line-prefix-template", "what stands before each line on the console; ${role_name}, ${local_rank}, "
         "${rank} and ${hostname} are replaced (default: '[rank ${rank}] ', or TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE)",
         str, "", "TEMPLATE"),
    Flag("duplicate-stdout-filters", "lines with one of these words also go to filtered_stdout.log", values.words, "",
         "WORDS"),
    Flag("duplicate-stderr-filters", "the same for stderr, to filtered_stderr.log", values.words, "", "WORDS"),
    Flag("event-log-handler", "console: a line of JSON on stderr for each start, failure and end", str, "null", "NAME",
         choices=("null", "console")),
    Flag("logs-specs", "torchrun's plug-ins for logs; refused, with the flags to use instead", values.logs_specs,
         metavar="NAME", variable=False),
    # cores
    Flag("numa-binding", "bind each worker to the cores of a NUMA node, socket or L3 cache, or to its own",
         str, metavar="MODE", choices=("node", "socket", "exclusive", "core-complex"), variable=False),
    Flag("no-pin", "do not bind workers to cores (by default each has cores of its own)", ours=True),
    # elastic training
    Flag("elastic", "a worker that dies is replaced while the others train on", ours=True),
    Flag("min-workers", "with --elastic: with fewer workers the others wait (default: 1)", values.from_1, ours=True),
    Flag("preload", "with --elastic: modules that are imported once, before workers are forked, so that those that "
         "take others' places start sooner", values.modules, "", "MODULE,...", ours=True),
    Flag("chaos", "with --elastic: kill or stop a random worker, after random times with these means; for tests",
         Chaos.parse, metavar="kill:2s,stop:5s,seed=7", ours=True),
    # connections
    Flag("security", "encrypt: encrypt all connections between machines; auth: only authenticate them; none: neither "
         "(default: PACELINE_SECURITY, or else they are encrypted where an address is public)", str, metavar="LEVEL",
         choices=LEVELS, variable=False, ours=True),
    Flag("insecure", "allow --security none between machines, on a network that is this job's alone", variable=False,
         ours=True),
    Flag("port", "the one TCP port of each machine at which the others reach all that it offers (default: "
         "PACELINE_PORT, or else each listener has a port of its own)", values.port, metavar="PORT", ours=True),
    # machines by ssh
    Flag("hosts", "start the launchers on these machines by ssh: a list, or a host file of MPI", str,
         metavar="HOST:N,...|FILE", short="-H", ours=True),
    Flag("ssh", "with --hosts: the ssh to use, with options of its own", str, "ssh", "COMMAND", ours=True),
    Flag("remote-python", "with --hosts: the interpreter on the other machines (if not given, this one's path)", str,
         metavar="PATH", ours=True),
    Flag("remote-dir", "with --hosts: the directory on the other machines (if not given, this one's path)", str,
         metavar="PATH", ours=True),
    Flag("export", "with --hosts: variables that the other machines' workers get, too", values.exports, "",
         "NAME,NAME=VALUE,...", ours=True),
    # the live page
    Flag("dash", "serve a live page of the job on this machine, for your eyes only (needs paceline[dash])", ours=True),
    Flag("dash-port", "with --dash: its port on loopback (if not given, a free one)", values.port,
         metavar="PORT", ours=True),
    Flag("dash-socket", "with --dash: a Unix socket in place of a port", str, metavar="PATH", ours=True),
    Flag("dash-prefix", "with --dash: the path under which a proxy serves it", str, "", "PATH", ours=True),
    Flag("dash-host", "with --dash: the names under which a proxy serves it", str, "", "NAMES", ours=True),
    Flag("dash-actions", "with --dash: the page may act, too: take the stacks of all ranks", ours=True),
    # others
    Flag("compat", "torch: calls of torch.distributed on CPU tensors use Paceline's engine, whatever backend the "
         "script names; horovod: `import horovod.torch` is paceline.horovod", libraries, "", "torch,horovod",
         variable=False, ours=True),
    Flag("stall-after", "when a call lasts longer, say which rank is not there and why; 0: never", values.seconds, "15",
         "SECONDS", variable=False, ours=True),
    Flag("stdin", "the rank that reads the launcher's stdin, or none; the other ranks' stdin is empty",
         values.rank_or_none, "0", "RANK|none", ours=True),
    Flag("print-completion", "print a script with which this shell completes `paceline`, and exit", str,
         metavar="SHELL", choices=SHELLS, variable=False, action=CompletionAction),
    Flag("dry-run", "print what would start where with which variables, and exit", variable=False, ours=True),
    Flag("print-token", "serve the meeting and print the token with which other machines join it", variable=False,
         ours=True),
)  # fmt: skip


def is_flag(word: str) -> bool:
    """Returns whether a word is a flag, or the beginning of one, with or without a value."""
    name = word.split("=")[0]
    return any(each.startswith(name) if name.startswith("--") else each == name[:2] for each in _spellings())


def flags_after_script(script: str, arguments: Sequence[str]) -> Iterator[str]:
    """Yields a sentence if the script gets flags of the launcher and does not seem to have flags of these names."""
    own = {each for each in _spellings() if each.startswith("--")}
    before_dashes = arguments[: arguments.index("--")] if "--" in arguments else arguments
    found = [name for word in before_dashes if (name := word.split("=")[0]) in own]
    if found and (text := _text_of(script)):
        found = [name for name in found if not {name[2:], name[2:].replace("-", "_")} & set(_WORD.findall(text))]
    if found:
        flags = ", ".join(dict.fromkeys(found))
        yield (
            f"the script gets {flags}, which the launcher has too: the launcher's flags stand before the script, as in "
            f"`paceline run {found[0]} ... {script}`"
        )


def _text_of(script: str) -> str:
    try:
        with open(script, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError):  # a module, a directory, or compiled code
        return ""


def _spellings() -> list[str]:
    return [spelling for flag in FLAGS for spelling in flag.spellings]


def add_flags(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Adds every flag; PET_* variables give the defaults."""
    groups = {
        False: parser.add_argument_group("torchrun's flags (--a-b or --a_b; PET_A_B in the environment)"),
        True: parser.add_argument_group("flags of Paceline's own"),
    }
    for flag in FLAGS:
        given = environment.get(f"PET_{flag.dest.upper()}") if flag.variable else None
        group = groups[flag.ours]
        if flag.parse is None:
            group.add_argument(
                *flag.spellings, action="store_true", default=given not in (None, "", "0"), help=flag.help
            )
        else:
            group.add_argument(
                *flag.spellings,
                type=flag.parse,
                default=flag.default if given is None else given,
                metavar=flag.metavar,
                choices=flag.choices,
                action=flag.action or "store",
                help=flag.help if flag.default in (None, "") else f"{flag.help} (default: {flag.default})",
            )
