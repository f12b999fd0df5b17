"""Migration of launch commands in shell scripts, batch files, YAML and Dockerfiles.

Such files mix languages (for example, a shell command in a YAML string). The rules therefore consider only the words of
a command and their position in the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.interop.migrate.names import MARK, MigratedFile, MigrationFinding, comment_lines

_ARGUMENT = r"""(?=[ \t]+(?:[-$\\"'{<]|[^\s#]+\.py\b)|[ \t]*\\$)"""
_NO_COMMAND = re.compile(
    r"^\s*(?:#|//|(?:@?echo|printf|pip3?|conda|import|from)\b|-?\s*(?:name|title|description|jobName|displayName)\s*:)"
)
_LOOKS_UP = re.compile(r"(?:\bwhich|\bcommand -v|\btype|\bhash|\bpkill|\bkillall|\bpgrep)\s+(?:-\w+\s+)*$")


@dataclass(frozen=True)
class _Rule:
    what: str
    pattern: re.Pattern[str]
    new: Callable[[re.Match[str]], str]


def _horovodrun(match: re.Match[str]) -> str:
    count = re.search(r"(?:-np|--num-proc)[ \t=]+(\S+)", match[0])
    assert count is not None
    return f"paceline run --nproc-per-node {count[1]} "


_PROGRAM = r"(?:[\w./${}~-]*/)?"
_RULES = (
    _Rule(
        "torchrun",
        re.compile(r"\$\((which|command -v) torchrun\)"),
        lambda match: f"$({match[1]} paceline) run",
    ),
    _Rule(
        "torchrun",
        re.compile(r"""^([ \t]*)- (["']?)torchrun\2[ \t]*$""", re.MULTILINE),
        lambda match: f"{match[1]}- {match[2]}paceline{match[2]}\n{match[1]}- {match[2]}run{match[2]}",
    ),
    _Rule(
        "torchrun",
        re.compile(r"""(["'])torchrun\1(?=\s*[,\]])"""),
        lambda match: f"{match[1]}paceline{match[1]}, {match[1]}run{match[1]}",
    ),
    _Rule(
        "torchrun",
        re.compile(rf"(?<![\w./$-]){_PROGRAM}torchrun{_ARGUMENT}", re.MULTILINE),
        lambda match: "paceline run",
    ),
    _Rule(
        "torch.distributed.run",
        re.compile(r"-m[ \t]+torch\.distributed\.run\b(?![.\w])"),
        lambda match: "-m paceline run",
    ),
    _Rule(
        "torch.distributed.run",
        re.compile(r"""(["'])-m\1(\s*,\s*)(["'])torch\.distributed\.run\3"""),
        lambda match: '{0}-m{0}{1}{0}paceline{0}{1}{0}run{0}'.format(match[1], match[2]),
    ),
    _Rule(
        "torch.distributed.run",
        re.compile(r"""^([ \t]*)- (["']?)-m\2[ \t]*\n\1- (["']?)torch\.distributed\.run\3[ \t]*$""", re.MULTILINE),
        lambda match: f"{match[1]}- {match[2]}-m{match[2]}\n{match[1]}- paceline\n{match[1]}- run",
    ),
    _Rule(
        "torch.distributed.launch",
        re.compile(r"""(-m[ \t]+|(["'])-m\2\s*,\s*["']|- ["']?-m["']?\n\s*- ["']?)torch\.distributed\.launch\b"""
            r"(?![.\w])"),
        lambda match: f"{match[1]}paceline.launch",
    ),
    _Rule(
        "horovodrun",
        re.compile(
            r"(?<![\w./-])horovodrun(?:[ \t]+(?:(?:-np|--num-proc)[ \t=]+\S+|--gloo|--mpi|--verbose|"
            r"-H[ \t]+localhost(?::\S+)?))+"
            r"[ \t]+(?:\\\n[ \t]*)?(?:python[\d.]*[ \t]+(?:-u[ \t]+)?)"
        ),
        _horovodrun,
    ),
)  # fmt: skip

_LEFT = (
    (re.compile(r"(?<![\w./-])horovodrun\b"), "horovodrun",
     "pass the number of ranks and the machines to `paceline run`: --nproc-per-node, --nnodes, --rdzv-endpoint"),
    (re.compile(r"(?<![\w./-])accelerate launch\b"), "accelerate launch",
     "Accelerate starts the processes itself; the script decides about the backend. `paceline run` starts it as well"),
    (re.compile(r"(?<![\w./-])deepspeed[ \t]+(?=\S+\.py\b|-)"), "deepspeed",
     "DeepSpeed's launcher and engine stay; Paceline's ZeroRedundancyOptimizer has the stages 1 to 3"),
)  # fmt: skip
_ETCD = re.compile(r"--rdzv[-_]backend[ \t=]+etcd")
_NODES = re.compile(r"--nnodes[ \t=\"',]+(?!1(?::1)?(?![\w:]))\S")
_SECRET = (
    "the machines authenticate each other with a secret: set PACELINE_SECRET to the same value on all of them (see "
    "docs/launcher.md, Several machines)"
)
_SHARES_A_SECRET = re.compile(r"PACELINE_SECRET|SBATCH|\bsrun\b|SLURM_")


def migrate_commands(text: str, backend_options: frozenset[str] = frozenset()) -> MigratedFile:
    """Returns the migrated text of a file that contains commands, and the findings.

    `backend_options` are the options of the program's scripts that supply the name of a backend.
    """
    places: list[MigrationFinding] = []
    comments: dict[int, str] = {}  # the reasons to write in comments, by line number in the original text (from 1)
    edits: list[tuple[int, int, str]] = []
    for rule in _RULES:
        for match in rule.pattern.finditer(text):
            at = match.start() + len(match[0]) - len(match[0].lstrip())
            if any(first < match.end() and match.start() < end for first, end, _ in edits) or not _is_command(text, at):
                continue
            new, reason = rule.new(match), _reason(text, match.start())
            edits.append((match.start(), match.end(), new))
            line = _line_of(text, at)
            places.append(MigrationFinding(line, rule.what, reason))
            if reason is not None:
                comments[line] = reason
    for pattern, what, reason in _LEFT:
        for match in pattern.finditer(text):
            if not any(start <= match.start() < end for start, end, _ in edits) and _is_command(text, match.start()):
                line = _line_of(text, match.start())
                places.append(MigrationFinding(line, what, reason))
                comments[line] = reason
    for match in _backends_in(text, backend_options):
        if _is_command(text, match.start()):
            edits.append((match.start("name"), match.end("name"), "paceline"))
            places.append(MigrationFinding(_line_of(text, match.start("name")), match["option"]))
    return MigratedFile(_edited(text, edits, comments), tuple(sorted(places, key=lambda place: place.line)))


def _backends_in(text: str, options: frozenset[str]) -> Iterator[re.Match[str]]:
    """Yields the places where one of the options has the value gloo: in a command, or in a list in JSON or YAML."""
    if options:
        names = "|".join(re.escape(option) for option in sorted(options))
        between = r"""(?:[ \t]*=[ \t]*|[ \t]+(?:\\\n[ \t]*)?|["']?[ \t]*,?\s*(?:-[ \t]+)?)["']?"""
        yield from re.finditer(rf"""(?<![\w-])(?P<option>{names}){between}\b(?P<name>gloo)(?![\w:.,/-]*\w)""", text)


def _is_command(text: str, at: int) -> bool:
    """Returns True if the text at `at` appears to be a command, based on its line."""
    before = text[text.rfind("\n", 0, at) + 1 : at]
    line = before + text[at : (text.find("\n", at) + 1 or len(text) + 1) - 1]
    is_comment = re.search(r"(?:^|\s)#", before) is not None
    return not is_comment and not _NO_COMMAND.match(line) and not _LOOKS_UP.search(before)


def _reason(text: str, at: int) -> str | None:
    command = text[at : _end_of_command(text, at)]
    if _ETCD.search(command):
        return (
            "the rendezvous runs on one of the machines: --rdzv-backend c10d instead of etcd, with the address of that "
            "machine as endpoint"
        )
    if _NODES.search(command) and not _SHARES_A_SECRET.search(text):
        return _SECRET
    return None


def _end_of_command(text: str, at: int) -> int:
    """Returns the end of the command: the end of its last continuation line or of the list that contains it."""
    lines = text[at:].split("\n")
    length = 0
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        length += len(line) + 1
        if not (line.rstrip().endswith(("\\", ",", "[")) or following.lstrip().startswith(("- ", "--"))):
            break
    return at + length


def _line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _edited(text: str, edits: list[tuple[int, int, str]], comments: dict[int, str]) -> str:
    lines = text.split("\n")
    above = {_place_of_comment(lines, line - 1): reason for line, reason in comments.items()}
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    insertions = [
        (starts[number], starts[number], _comment(lines[number], reason))
        for number, reason in above.items()
        if number == 0 or MARK not in "\n".join(lines[max(0, number - 3) : number])
    ]
    for start, end, new in sorted([*edits, *insertions], reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _comment(line: str, reason: str) -> str:
    indent = line[: _indent(line)]
    return "".join(f"{indent}{part}\n" for part in comment_lines(reason, len(indent)))


def _place_of_comment(lines: list[str], number: int) -> int:
    """Returns the line above which a comment can be inserted without splitting a command or changing a string."""
    while number > 0 and lines[number - 1].rstrip().endswith("\\"):
        number -= 1
    for header in range(number - 1, -1, -1):  # searches for the first line of an enclosing list or folded text
        is_outer = lines[header].strip() and _indent(lines[header]) < _indent(lines[number])
        if is_outer and re.search(r"(?::|-)\s*(?:>[+-]?|\[)\s*$", lines[header]):
            return header
        if is_outer:
            break
    return number


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
